"""What can be compared: names of models and algorithms with their defaults, known without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# What final parameters are compared with.
REFERENCE = "torch-ddp"
# What extra memory is counted from.
ALL_REDUCE = "with-bagua"


class Promise(Enum):
    """What an algorithm says of the models that it ends with."""

    AS_DDP = "as DDP"  # those of torch's DDP, but for the order of sums
    EQUAL = "equal"  # another training; all ranks have the same bits
    OWN = "own"  # every rank has a model of its own


@dataclass(frozen=True)
class AlgorithmEntry:
    promise: Promise
    about: str
    # Compresses only after so many steps, all but one of which shall be over when steps are measured.
    least_warmup: int = 0


ALGORITHMS: dict[str, AlgorithmEntry] = {
    REFERENCE: AlgorithmEntry(Promise.AS_DDP, "torch's DistributedDataParallel, its gradients views of the buckets"),
    ALL_REDUCE: AlgorithmEntry(Promise.AS_DDP, "with_bagua, gradient_allreduce"),
    "bagua-ddp": AlgorithmEntry(Promise.AS_DDP, "Bagua's DistributedDataParallel, gradient_allreduce"),
    "ddp-fp16": AlgorithmEntry(Promise.EQUAL, "torch's DDP with its fp16_compress_hook"),
    "ddp-powersgd": AlgorithmEntry(Promise.EQUAL, "torch's DDP with its powerSGD_hook, rank 1", least_warmup=3),
    "ddp-bytegrad": AlgorithmEntry(Promise.EQUAL, "torch's DDP with bagua.comm_hooks.bytegrad"),
    "bytegrad": AlgorithmEntry(Promise.EQUAL, "bytegrad: 8-bit gradients, once per node"),
    "bytegrad-flat": AlgorithmEntry(Promise.EQUAL, "bytegrad with hierarchical=False"),
    "bytegrad-int4": AlgorithmEntry(Promise.EQUAL, "bytegrad with codec=int4, hierarchical=False"),
    "qadam": AlgorithmEntry(Promise.EQUAL, "qadam with its QAdamOptimizer instead of the model's", least_warmup=3),
    "decentralized": AlgorithmEntry(Promise.OWN, "decentralized: the mean of all ranks' parameters"),
    "decentralized-shift-one": AlgorithmEntry(Promise.OWN, "decentralized with one peer, another one in each step"),
    "low-precision-decentralized": AlgorithmEntry(Promise.OWN, "low_precision_decentralized: ring, 8-bit"),
    "async": AlgorithmEntry(Promise.OWN, "async with sync_interval_ms=0: averages parameters while training goes on"),
    "fsdp": AlgorithmEntry(Promise.EQUAL, "torch's FSDP2; with bf16, weights in bf16 and gradients reduced in float32"),
    "fsdp-kept": AlgorithmEntry(Promise.EQUAL, "the same, which keeps gathered weights until the backward pass"),
    "fsdp-int8": AlgorithmEntry(Promise.EQUAL, "fsdp with int8 gradients"),
    "fsdp-int4": AlgorithmEntry(Promise.EQUAL, "fsdp with int4 gradients"),
    "fsdp-int8-weights": AlgorithmEntry(Promise.EQUAL, "fsdp with int8 gradients and weights"),
    "fsdp-int4-differences": AlgorithmEntry(Promise.EQUAL, "fsdp-kept with int4 gradients and int4 weight differences"),
}
FSDP = "fsdp"
# In the order in which the first round takes them.
DEFAULT_ALGORITHMS = (REFERENCE, ALL_REDUCE, "bagua-ddp")
# Names for several; `algorithms` leaves out what is another way to the same communication.
GROUPS: dict[str, tuple[str, ...]] = {
    "core": DEFAULT_ALGORITHMS,
    "algorithms": tuple(name for name in ALGORITHMS if name != "bagua-ddp" and not name.startswith(FSDP)),
    "fsdp2": tuple(name for name in ALGORITHMS if name.startswith(FSDP)),
    "all": tuple(ALGORITHMS),
}

FLOAT32, BF16 = "float32", "bf16"
DTYPES = (FLOAT32, BF16)


@dataclass(frozen=True)
class ModelEntry:
    """`length` is the side of a picture in pixels, the tokens of a sequence, the depth or the width: what makes a model
    large."""

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
    "wide": ModelEntry(8, FLOAT32, 4096, 1024, 4, "five square layers: as many bytes for little arithmetic as can be"),
}
DEFAULT_MODELS = ("resnet50", "vgg16", "gpt2", "tiny-2000")
DEFAULT_MODELS_ON_CPU = ("mlp", "convnet")
