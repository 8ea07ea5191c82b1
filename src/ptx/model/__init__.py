"""A Llama-style Transformer, its arguments and named sizes."""

from ptx.model._args import LinearScaling as LinearScaling
from ptx.model._args import Llama3Scaling as Llama3Scaling
from ptx.model._args import ModelArgs as ModelArgs
from ptx.model._args import RopeScaling as RopeScaling
from ptx.model._presets import preset as preset
from ptx.model._transformer import Transformer as Transformer

__all__ = ["LinearScaling", "Llama3Scaling", "ModelArgs", "RopeScaling", "Transformer", "preset"]
