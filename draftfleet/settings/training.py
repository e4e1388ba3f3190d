"""[trainer], [eagle3], [dflash], [evaluation], [export]: from samples to a drafter that engines serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from draftfleet.names import NAME
from draftfleet.settings.section import Section


class Trainer(Section):
    """From shards to a drafter."""

    drafter: str = Field(default="eagle3", pattern=NAME, description="Name of the drafter: its folder in the run.")
    algorithm: Literal["eagle3", "dflash"] = Field(
        default="eagle3", description="How the drafter drafts and is trained: [eagle3] or [dflash] has its knobs."
    )
    target: Literal["hf", "cache", "vllm"] = Field(
        default="hf",
        description="How hidden states are had: hf (in this process), cache (kept on a disk: [cache]), vllm (from "
        "serving engines: [capture]).",
    )
    layers: list[NonNegativeInt] | None = Field(
        default=None,
        description="Layers whose outputs the drafter sees, 0-based. Unset: three for eagle3, five for dflash.",
    )
    ttt_steps: PositiveInt = Field(
        default=3, description="Training-time test: draft steps unrolled in training. Match serving."
    )
    step_decay: float = Field(default=0.8, gt=0, le=1, description="Weight of each further draft step in the loss.")
    max_steps: PositiveInt = Field(default=20_000, description="Optimizer steps; the schedule ends there.")
    batch_tokens: PositiveInt = Field(default=8192, description="Tokens per batch, padding included.")
    accumulation: PositiveInt = Field(default=1, description="Batches per optimizer step.")
    max_length: PositiveInt = Field(default=4096, description="Longer samples are cut to this many tokens.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: Muon for the matrices within the drafter, AdamW for head and norms."
    )
    lr: PositiveFloat = Field(default=1e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear"] = Field(
        default="cosine", description="How the learning rate falls to zero after its warmup."
    )
    warmup: float = Field(default=0.015, ge=0, lt=1, description="Share of `max_steps` with a rising learning rate.")
    clip: PositiveFloat = Field(default=0.5, description="Largest norm of a gradient.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of target and forward pass; trained weights stay float32. auto: bfloat16 on a GPU, else float32.",
    )
    attention: Literal["auto", "eager", "flex"] = Field(
        default="auto", description="Of the drafter. auto: flex attention on a GPU that can, else the eager form."
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile of the drafter's layers. auto: on a GPU."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute the inside of layers again in the backward pass: less memory, more time."
    )
    device: str = Field(default="auto", description="Of this node: auto, cpu, cuda or cuda:N.")
    device_map: Literal["auto", "balanced", "sequential"] | None = Field(
        default=None,
        description="Spread the target hf over the GPUs of this node, by Accelerate. Unset: all of it on `device`.",
    )
    target_gpu_gb: PositiveFloat | None = Field(
        default=None, description="With `device_map`, the most that a GPU may hold of the target, in GB."
    )
    seed: int = Field(default=0, description="Of weights and data order.")
    checkpoint_steps: PositiveInt = Field(default=200, description="Optimizer steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(
        default=2, description="How many of the latest checkpoints stay, besides the best that was measured."
    )
    evaluate_steps: NonNegativeInt = Field(
        default=0,
        description="Optimizer steps between measurements of acceptance on held-out prompts; each has a checkpoint. "
        "0: none is measured, and the latest counts as the best.",
    )
    evaluate_prompts: PositiveInt = Field(
        default=16, description="Held-out prompts of such a measurement, the same ones each time."
    )
    log_steps: PositiveInt = Field(default=10, description="Optimizer steps between log lines.")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default=["tensorboard"], description="Where the figures of a training go, besides log and progress."
    )
    prefetch: NonNegativeInt | None = Field(
        default=None,
        description="Batches whose hidden states are captured ahead, beside the step at hand. Unset: 2; 0 where the "
        "target computes on the CPU that trains.",
    )
    processes: PositiveInt = Field(default=1, description="Processes of torchrun.")
    poll_s: PositiveFloat = Field(default=2, description="Seconds between looks for new shards.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Where Prometheus reads. 0: any free port. Unset: nowhere."
    )
    metrics_address: str = Field(default="127.0.0.1", description="Loopback: the page needs no login.")


class Eagle3(Section):
    """An EAGLE-3 drafter, where trainer.algorithm = eagle3. Pinned with the drafter."""

    loss: Literal["soft_ce", "forward_kl", "lk"] = Field(
        default="soft_ce",
        description="Against the target's distribution: its cross-entropy over the draft vocabulary, its divergence "
        "over the whole one, or the LK hybrid, which turns from divergence to acceptance.",
    )
    head: Literal["own", "frozen"] = Field(
        default="own", description="The output matrix begins as the target's: trained on, or kept."
    )
    style: Literal["llama", "qwen3", "auto"] = Field(
        default="llama",
        description="Of the decoder layer. qwen3: queries and keys are normed, which SGLang does not serve. "
        "auto: as the target.",
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=None, description="Tokens that can be drafted, the most frequent. Unset: the whole vocabulary."
    )
    vocab_rows: PositiveInt = Field(
        default=10_000,
        description="Rows that `draft_vocab_size` is counted on: training waits for them, or for the run's last.",
    )
    fc_norm: bool = Field(default=False, description="Norm the states of each target layer (EAGLE-3.1).")
    norm_before_fc: bool = Field(default=False, description="Norm the states of all target layers, side by side.")
    norm_output: bool = Field(
        default=False, description="Norm what passes from one draft step to the next, as engines mean it (EAGLE-3.1)."
    )
    norm_before_residual: bool = Field(
        default=False, description="Begin the residual with the normed state. SGLang does not serve it."
    )
    start_from: str = Field(
        default="",
        description="Drafter to start from: run:RUN/DRAFTER, or a folder, of this trainer or of an engine. Empty: "
        "afresh.",
    )


class DFlash(Section):
    """A DFlash drafter, where trainer.algorithm = dflash. Pinned with the drafter."""

    num_layers: PositiveInt = Field(default=5, description="Decoder layers of the drafter.")
    block_size: int = Field(
        default=16, ge=2, description="Tokens of a block: the one that the target chose, and those drafted after it."
    )
    anchors: PositiveInt = Field(default=512, description="Most blocks of a sample, in each epoch at other places.")
    anchor_share: float = Field(
        default=1.0, gt=0, le=1, description="Share of the places where a sample can have a block, drawn in an epoch."
    )
    mask_token_id: NonNegativeInt | None = Field(
        default=None, description="Stands in the slots to be drafted: a token never generated. Unset: a spare one."
    )
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        default=None, description="Of each layer of the drafter. Unset: full attention."
    )
    sliding_window: PositiveInt | None = Field(
        default=None, description="Positions that a sliding layer sees, the slot's own included."
    )
    causal: bool | None = Field(
        default=None,
        description="Whether a slot sees only the slots before it. Unset: in sliding layers alone, as engines take it.",
    )
    labels: Literal["hard", "soft"] = Field(
        default="hard", description="What is learnt: the tokens that came, or the target's distributions of them."
    )
    weights: Literal["decay", "dpace"] = Field(
        default="dpace", description="Of the slots in the loss: falling with the slot, or with what the draft reaches."
    )
    gamma: PositiveFloat | None = Field(
        default=None, description="decay: slots until a weight has fallen to 37 %. Unset: 4 for blocks of 8, 7 of 16."
    )
    alpha: float = Field(default=0.5, ge=0, le=1, description="dpace: a slot counts as right by this much at least.")
    start_from: str = Field(
        default="",
        description="Drafter to start from: run:RUN/DRAFTER, or a folder, of this trainer or of an engine. Empty: "
        "afresh.",
    )


class Evaluation(Section):
    """Draft-and-verify on held-out prompts."""

    k: PositiveInt = Field(default=3, description="Tokens drafted per pass of the target.")
    sweep: list[PositiveInt] = Field(default=[], description="Other numbers of drafted tokens to measure as well.")
    prompts: PositiveInt = Field(default=64, description="Held-out prompts; of a conversation all turns.")
    max_tokens: PositiveInt = Field(default=256, description="Longest completion in tokens.")
    temperature: NonNegativeFloat = Field(
        default=0, description="0: greedy. Above: answers are sampled, and drafts verified by rejection sampling."
    )
    drafts: Literal["sampled", "best"] = Field(
        default="sampled",
        description="Of a sampled answer: drafts are drawn from the drafter's distribution, or are its best tokens.",
    )
    seed: int = Field(default=0, description="Of sampled answers; each prompt has dice of its own.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the target. In bfloat16, half as large, near ties may differ: not lossless."
    )


class Export(Section):
    """The drafter as a folder that engines serve."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Of the exported weights. auto: the target's, which engines convert to anyway."
    )
    target_name: str | None = Field(
        default=None, description="Name of the target for others, as on the hub: ORG/NAME. Unset: target.path."
    )
