"""The configuration of a run: nested groups, read from TOML and changed from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from treadle.models.model_config import ModelConfig
from treadle.moe.exchanges import ExchangeName
from treadle.schedules import default_schedule
from treadle.train.optim.lr_schedule import DecayShape
from treadle.train.optim.optimizer_config import OptimizerConfig

Precision: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class DataConfig:
    """The text to train on."""

    paths: tuple[str, ...] = ("stdlib",)
    """Files, directories and patterns such as "corpus/**/*.jsonl"; a .jsonl file has a document a line, any other is
    one document. "stdlib" means the sources of Python's standard library, without its tests."""

    field: str = "text"
    """The field of a .jsonl line that has the text."""

    tokenizer: str = "bytes"
    """"bytes", a Hugging Face tokenizer.json, or a directory with one."""

    end_of_document: str = ""
    """The token of a tokenizer.json that ends a document. Empty: a usual one, such as <|endoftext|>."""

    held_out: float = 0.02
    """The share of documents that are held out for evaluation, chosen by a digest of each."""

    cache: str = ""
    """The directory of tokenised text, which runs may share. Empty: OUTPUT/data."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over pp x dp x ep ranks."""

    pp: int = 1
    """Ranks of a pipeline."""

    ep: int = 1
    """Ranks of an expert group. Each has its own tokens and its part of the experts."""

    dp: int | None = None
    """Copies of the pipelines with their experts. None: as many as there are ranks for."""

    exchange: ExchangeName = "all_to_all"
    """How tokens travel to their experts and back. deepep needs the package deep_ep, and bfloat16."""

    schedule: str = default_schedule()
    """The pipeline's schedule; `treadle schedules` lists them."""

    vpp: int | None = None
    """Stages on each rank, where the schedule leaves a choice. None: its default."""

    layout: str = ""
    """Megatron's layout string, such as "Et|tt|ttL": the blocks of each stage. Empty: layers as even as can be."""

    recompute: tuple[Literal["attn", "mlp"], ...] = ()
    """Segments of layers that are recomputed before their backward instead of saved."""

    saved: Literal["leave", "count", "offload"] = "leave"
    """What becomes of tensors saved for backward: left, counted, or offloaded to the host."""

    lanes: Literal["thread", "paced", "serial", "virtual"] = "thread"
    """What runs the lanes of a rank on a CPU. On a GPU lanes are streams."""

    plan_again_at: int = 4
    """The step of a run, counted from its start or restart, after which ops of layers are ordered by what they took in
    it. 0: never, they stay in an order in which communication takes no time. No number of the run depends on it."""

    deadline_s: float = 600.0
    """Seconds that a rank waits for another before it takes that rank for lost. Saving and evaluating count."""


@dataclass(frozen=True)
class TrainingConfig:
    """The steps."""

    steps: int = 100
    """Steps of the whole run, those before a restart included."""

    global_batch_size: int = 16
    """Samples of a step, over all replicas."""

    micro_batch_size: int = 1
    """Samples of a micro-batch. Each replica has global_batch_size / micro_batch_size / (dp * ep) micro-batches."""

    seq_len: int = 128
    """Tokens of a sample."""

    seed: int = 0
    """Of initial weights, the order of samples, and dropout."""

    dtype: Precision = "float32"
    """Of parameters and computation. With bfloat16 the optimizer has float32 masters."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it trains. auto: on GPUs if this machine has them."""

    lr: float = 3e-4
    """The learning rate between warm-up and decay."""

    warmup_steps: int = 0
    """First steps, in which the learning rate rises to `lr`."""

    decay_steps: int = 0
    """Last steps, in which the learning rate falls to `final_lr`; cut where `steps` are fewer than both."""

    final_lr: float = 0.0
    """The learning rate after the last step."""

    decay_shape: DecayShape = "linear"
    """The curve of the decay."""

    clip_norm: float = 1.0
    """Gradients are scaled down to this norm, that of the whole model. 0: never."""

    eval_every: int = 0
    """Steps between evaluations on held-out text. 0: none."""

    eval_batches: int = 0
    """Global batches of an evaluation. 0: all of the held-out text."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of the run."""

    every: int = 0
    """Steps between two checkpoints. 0: only at the end, and where the run is asked to stop (SIGTERM)."""

    keep: int = 2
    """How many of the latest to keep."""

    directory: str = ""
    """Where they are. Empty: OUTPUT/checkpoints."""

    resume: bool = True
    """Go on from the latest intact checkpoint in the directory, if there is one. Without, checkpoints of later steps
    are set aside (renamed) when the run saves its own."""

    weights: str = ""
    """A directory with Hugging Face safetensors to start from, where there is no checkpoint; its config.json is the
    model. Empty: random weights."""

    export: bool = False
    """Save the trained model for Hugging Face in OUTPUT/model."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run reports."""

    every: int = 1
    """Steps between two lines."""

    measure_every: int = 10
    """Steps between two measurements of bubble and hidden communication. 0: none."""

    trace_every: int = 0
    """Steps between two traces, files for Perfetto in OUTPUT/traces. 0: none."""

    tensorboard: bool = True
    """Write OUTPUT/tensorboard."""


@dataclass(frozen=True)
class TrainConfig:
    """A whole run.

    Example:
        >>> from dataclasses import replace
        >>> config = TrainConfig(training=TrainingConfig(global_batch_size=16, micro_batch_size=2))
        >>> config.num_microbatches(num_replicas=4)
        2

    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, in Hugging Face's words. With `checkpoint.weights` it is that of their config.json."""

    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    output: str = "runs/default"
    """The directory of everything that the run writes."""

    dry_run: bool = False
    """Print what the run would do, and do nothing."""

    costs: str = ""
    """A file of costs that a dry run predicts a step with. Empty: OUTPUT/costs.toml, which a run writes with its traces
    (`logging.trace_every`)."""

    def num_microbatches(self, num_replicas: int) -> int:
        """Return the micro-batches of each replica.

        Raises:
            ValueError: the global batch does not divide; the message names the nearest size that does.

        """
        training = self.training
        unit = training.micro_batch_size * num_replicas
        if training.global_batch_size % unit:
            nearest = max(1, round(training.global_batch_size / unit)) * unit
            raise ValueError(
                f"training.global_batch_size is a multiple of micro_batch_size x replicas, {training.micro_batch_size} "
                f"x {num_replicas} (dp x ep), got {training.global_batch_size}; the nearest is {nearest}"
            )
        return training.global_batch_size // unit
