"""What can be compared: names of models and contenders with their defaults, known without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

BASELINE = "torch-ddp"
# In the order in which the first round takes them; the baseline first, so that it is what later ones are compared with.
CONTENDERS = (BASELINE, "with-bagua", "bagua-ddp")

FLOAT32, BF16 = "float32", "bf16"
DTYPES = (FLOAT32, BF16)


@dataclass(frozen=True)
class ModelEntry:
    """`length` is the side of a picture in pixels, the tokens of a sequence, or the depth: what makes a model large."""

    batch_size: int  # samples per rank and step
    dtype: str  # on a GPU; a CPU computes in float32
    length: int  # on a GPU
    length_on_cpu: int
    batch_size_on_cpu: int
    about: str


MODELS: dict[str, ModelEntry] = {
    "resnet50": ModelEntry(32, BF16, 224, 64, 4, "ResNet-50: 161 gradients of all sizes, BatchNorm's buffers"),
    "vgg16": ModelEntry(32, BF16, 224, 32, 4, "VGG16: many bytes for little arithmetic, most of them in one layer"),
    "gpt2": ModelEntry(4, BF16, 1024, 64, 1, "GPT-2 small: 12 layers of 768, 12 heads, tied embeddings, AdamW"),
    "tiny-2000": ModelEntry(32, FLOAT32, 2000, 2000, 8, "2000 layers of width 16: what a gradient itself costs"),
    "mlp": ModelEntry(32, FLOAT32, 32, 32, 32, "three linear layers, as in examples/ddp_train.py"),
    "convnet": ModelEntry(32, FLOAT32, 32, 16, 16, "four convolutions with BatchNorm"),
}
DEFAULT_MODELS = ("resnet50", "vgg16", "gpt2", "tiny-2000")
DEFAULT_MODELS_ON_CPU = ("mlp", "convnet")
