"""Checkpoints in Hugging Face's form: a folder of config.json and safetensors files, of every member of the family.

names    which tensor is which weight       files    safetensors, read box by box and written piece by piece
config   config.json <-> ModelConfig        fp8      block-scaled float8
load     a model put together from tensors, a piece at a time; save    and taken apart into them
"""

from glm_jax.model.huggingface.config import config_from_huggingface, config_to_huggingface
from glm_jax.model.huggingface.files import CheckpointError
from glm_jax.model.huggingface.load import load_pretrained
from glm_jax.model.huggingface.save import save_pretrained

__all__ = ["CheckpointError", "config_from_huggingface", "config_to_huggingface", "load_pretrained", "save_pretrained"]
