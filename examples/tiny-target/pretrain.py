"""Train the tiny target from nothing: its tokenizer, then its weights. About an hour on one core.

    OMP_NUM_THREADS=1 python examples/tiny-target/pretrain.py --out my-target

One thread is faster than two that share a core. `--init FOLDER` goes on from a model, on fresh conversations of another
`--seed`. The same command on the same machine gives the same loss; another Python has other modules to learn spelling
from, so its tokenizer may differ.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import Conversation, conversations
from jinja2 import Template
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
CONTEXT = 1024
VALIDATION_SEED = 999
SPELLING = ("this", "argparse", "json.decoder", "random", "statistics", "textwrap")
"""Modules whose source the tokenizer reads too, so that text unlike the corpus does not fall into single bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    out: Path
    init: Path | None
    seed: int
    num_conversations: int
    steps: int
    batch: int
    length: int
    lr: float
    vocabulary: int


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    talks = conversations(options.seed, options.num_conversations)
    tokenizer = load_tokenizer(options.init) if options.init else make_tokenizer(talks, options.vocabulary)
    train_rows = pack(tokenizer, talks, options.length)
    valid_rows = pack(tokenizer, conversations(VALIDATION_SEED, 400), options.length)[:64]
    model = Qwen3ForCausalLM.from_pretrained(options.init, dtype=torch.float32) if options.init else build(tokenizer)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters, {train_rows.numel():,} tokens of text")

    history = train(model, train_rows, valid_rows, options)
    save(model, tokenizer, options, history)
    print(f"model in {options.out}: {history[-1]}")


def parse() -> Options:
    parser = argparse.ArgumentParser(description="Train the tiny target.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    parser.add_argument("--init", type=Path, help="folder of a model to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations and the weights")
    parser.add_argument("--num-conversations", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--vocabulary", type=int, default=2_048)
    return Options(**vars(parser.parse_args()))


# -- text to tokens


def render(talks: list[Conversation]) -> list[str]:
    template = Template(TEMPLATE)
    return [template.render(messages=talk.messages) for talk in talks]


def make_tokenizer(talks: list[Conversation], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of Qwen: digits stand alone, `<think>` and `</think>` are one token each."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytelevel = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), bytelevel])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*render(talks[:12_000]), *_source_lines()], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def _source_lines() -> Iterable[str]:
    for module in SPELLING:
        spec = importlib.util.find_spec(module)
        assert spec, module
        assert spec.origin, module
        yield from Path(spec.origin).read_text(encoding="utf-8").splitlines()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def pack(tokenizer: PreTrainedTokenizerFast, talks: list[Conversation], length: int) -> Tensor:
    """(rows, T+1): conversations in random order, end to end, cut into rows; prompts are learned too."""
    encoded: list[list[int]] = tokenizer(render(talks), add_special_tokens=False)["input_ids"]
    random.Random(1).shuffle(encoded)
    flat = torch.tensor([token for ids in encoded for token in ids])
    num_rows = flat.numel() // (length + 1)
    return flat[: num_rows * (length + 1)].view(num_rows, length + 1)


# -- the model and its training


def build(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Eight layers, so that the layers a drafter looks at differ from each other and from every engine's fallback."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_id_of(tokenizer.eos_token, tokenizer),
        pad_token_id=_id_of(tokenizer.pad_token, tokenizer),
    )
    return Qwen3ForCausalLM(config)


def _id_of(token: object, tokenizer: PreTrainedTokenizerFast) -> int:
    found = tokenizer.convert_tokens_to_ids(str(token))
    assert isinstance(found, int), token
    return found


def train(model: Qwen3ForCausalLM, rows: Tensor, valid_rows: Tensor, options: Options) -> list[dict[str, float]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    history: list[dict[str, float]] = []
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(step, options.steps)
        batch = rows[torch.randint(0, len(rows), (options.batch,))]
        loss = loss_of(model, batch)[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == options.steps:
            seconds = time.monotonic() - started
            tokens = step * options.batch * options.length
            history.append({"step": step, "tokens": tokens, "loss": loss.item(), **validate(model, valid_rows)})
            print(json.dumps({**history[-1], "tokens_per_s": round(tokens / seconds)}), flush=True)
    return history


def schedule(step: int, steps: int) -> float:
    """Up for 50 steps, level until 30 % of the way, then a cosine down to 5 %."""
    progress = max(0.0, (step / steps - 0.3) / 0.7)
    return min(1.0, step / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model: Qwen3ForCausalLM, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and the share of tokens guessed right, of rows (B, T+1)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1]).logits  # (B, T, V)
    labels = batch[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten()), (logits.argmax(-1) == labels).float().mean()


@torch.no_grad()
def validate(model: Qwen3ForCausalLM, rows: Tensor) -> dict[str, float]:
    model.eval()
    results = torch.tensor([loss_of(model, batch) for batch in rows.split(16)]).mean(0)
    model.train()
    return {"valid_loss": results[0].item(), "valid_accuracy": results[1].item()}


def save(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: Options, history: list[dict[str, Any]]
) -> None:
    """In bfloat16, as large models are; either token that ends a turn or a text stops generation."""
    model = model.eval().bfloat16()
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    assert model.generation_config is not None
    model.generation_config.update(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    made = {"options": {key: str(value) for key, value in asdict(options).items()}, "history": history}
    (options.out / "training.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
