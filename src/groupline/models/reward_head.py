"""A reward model: a transformers sequence classifier with one number for a text, and the scores of many at once.

The score of a text is the head's value at its last token. Texts are packed, so none is padded; no score depends on what
stands beside it.

Legend: S texts, H hidden width.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from groupline.models.load import check_weights, end_ids, load_model, load_tokenizer, resolve_model
from groupline.models.packing import Ids, by_tokens, causal_lm, eval_mode, hidden_states, pack, why_not_packed

END = (0,)  # stands after a text in its packed row: predicted from the last token, whose hidden state that shows
Answers = tuple[Ids, Sequence[Ids]]  # a prompt and the answers to it


def add_reward_head(model: nn.Module, tokenizer: Any, seed: int = 0) -> Any:
    """A sequence classifier with one label: a copy of this causal LM's decoder, and a random head drawn by `seed`.

    An adapter on `model` is merged into the copy. The classifier's `pad_token_id` is one that ends no answer, be it the
    tokenizer's own or not: transformers finds a text's last token by it, and would pass over the answer's end.

    Raises:
        ValueError: transformers has no sequence classifier of this architecture with a head `score`, or the tokenizer
            has no token to pad with.
    """
    base: Any = copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = _padding(tokenizer, end_ids(base, tokenizer))
    torch.manual_seed(seed)
    try:
        made: Any = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        made = None
    if not isinstance(getattr(made, "score", None), nn.Linear):
        raise ValueError(f"transformers makes no sequence classifier with a head `score` of {type(base).__name__}")
    made.base_model.load_state_dict(base.base_model.state_dict())
    made.config.name_or_path = made.name_or_path = base.name_or_path  # what an adapter's file will name as its base
    return made.to(next(base.parameters())).eval()


def load_reward_model(folder: str | Path, device: torch.device | str = "cpu", trust_remote_code: bool = False) -> Any:
    """A reward model in fp32 and in evaluation mode, from a folder that `reward_model` wrote or any folder or hub id
    of a transformers sequence classifier with one label.

    A folder with an adapter gives the classifier on its base, with the adapter's weights and head, trainable.
    ValueError: the model has another number of labels, or a head that is not called `score`.
    """
    source = Path(resolve_model(str(folder)))
    if source.is_dir():
        check_weights(source)
    if (source / "adapter_config.json").exists():
        settings = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        name = settings["base_model_name_or_path"]
        if is_reward_model(name):
            model = load_reward_model(name, device, trust_remote_code)
        else:
            base = load_model(name, device, trust_remote_code)
            model = add_reward_head(base, load_tokenizer(str(source), trust_remote_code))
        with warnings.catch_warnings():  # peft asks for an attribute that transformers is renaming
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return PeftModel.from_pretrained(model, str(source), is_trainable=True).to(device).eval()
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        str(folder), dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    if loaded.config.num_labels != 1 or not hasattr(loaded, "score"):
        raise ValueError(
            f"{folder} is a {type(loaded).__name__} with {loaded.config.num_labels} labels; a reward model has one, "
            "and a head `score`"
        )
    return loaded.to(device).eval()


def is_reward_model(name: str) -> bool:
    """Whether a folder holds a sequence classifier rather than a language model."""
    file = Path(resolve_model(name)) / "config.json"
    kinds = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else None
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds or ())


def packed_scores(
    model: nn.Module, texts: Sequence[Answers], shared: bool = True, compute: torch.dtype = torch.float32
) -> Tensor:
    """Scores [S] in fp32 (fp64 if the weights are), differentiable: every answer to every prompt, in their order.

    One packed row, each prompt in it once. shared: see `hidden_states`.
    """
    head = causal_lm(model).score
    weight = next(head.parameters())  # type: ignore[union-attr]
    row = pack([p for p, _ in texts], [[[*a, *END] for a in answers] for _, answers in texts], weight.device)
    with torch.autocast(weight.device.type, compute, enabled=compute != torch.float32):
        hidden = hidden_states(model, row, shared)
    last = torch.tensor([len(a) + 1 for _, answers in texts for a in answers], device=weight.device).cumsum(0) - 1
    scores: Tensor = head(hidden[last].to(weight.dtype)).squeeze(-1)  # type: ignore[operator]
    return scores


@torch.no_grad()
def score_answers(
    model: nn.Module,
    answers: Iterable[tuple[Ids, Ids]],
    token_limit: int = 4096,
    *,
    shared: bool | None = None,
    compute: torch.dtype = torch.float32,
) -> list[float]:
    """One score per (prompt ids, answer ids), without dropout. The score is read at the answer's last token.

    Neighbours with an equal prompt share it. token_limit: most tokens of a packed row (or one prompt with its answers,
    if those alone are more). shared: whether the model takes packed rows, None to find out (two short passes).
    ValueError: an empty prompt.
    """
    if shared is None:
        shared = why_scores_not_shared(model) is None
    texts = [(prompt, [answer for _, answer in own]) for prompt, own in groupby(answers, key=lambda pair: pair[0])]
    found: list[float] = []
    with eval_mode(model):
        for part in by_tokens(_cut(texts, token_limit), tokens_of, token_limit):
            found += packed_scores(model, part, shared, compute).tolist()
    return found


def score_sequences(
    model: nn.Module,
    sequences: Iterable[Ids],
    token_limit: int = 4096,
    *,
    shared: bool | None = None,
    compute: torch.dtype = torch.float32,
) -> list[float]:
    """One score per sequence of token ids, prompt and answer in one, read at its last token; otherwise `score_answers`.

    Ids that only pad must not be among them.
    """
    return score_answers(model, ((ids, ()) for ids in sequences), token_limit, shared=shared, compute=compute)


def tokens_of(text: Answers) -> int:
    """Row tokens of a prompt with its answers."""
    return len(text[0]) + sum(map(len, text[1]))


def why_scores_not_shared(model: nn.Module) -> str | None:
    """None if packed rows give this model's own scores; otherwise the reason they cannot be used.

    Raises ValueError if plain rows do not either: its score is then not the head's value at the last token.
    """
    inner: Any = causal_lm(model)
    vocabulary = inner.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    padding = inner.config.get_text_config().pad_token_id
    prompt, one, other = (
        [i for i in torch.randint(0, vocabulary, (n,), generator=draw).tolist() if i != padding] for n in (8, 6, 5)
    )
    texts: list[Answers] = [(prompt, [one, other]), (one, [prompt])]
    with torch.no_grad(), eval_mode(model):
        plain = torch.cat([own_score(inner, [*p, *a]) for p, answers in texts for a in answers])

        def gap(shared: bool) -> float:
            return float((packed_scores(model, texts, shared) - plain).abs().max() / plain.abs().max().clamp(min=1e-9))

        limit = 1e-3 if plain.dtype in (torch.float32, torch.float64) else 5e-2
        reason = why_not_packed(inner, gap, limit)
        if reason is not None and gap(False) >= limit:
            raise ValueError(
                f"the score of a {type(inner).__name__} is not its head's value at the last token (they differ by "
                f"{gap(False):.1e} of the largest)"
            )
    return reason


def own_score(model: Any, ids: Ids) -> Tensor:
    """The score [1] that transformers gives these ids alone."""
    score: Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[:, 0]
    return score


def _cut(texts: Iterable[Answers], limit: int) -> Iterator[Answers]:
    """The same answers in the same order; a prompt whose answers do not fit beside it comes several times."""
    for prompt, answers in texts:
        for part in by_tokens(answers, len, max(1, limit - len(prompt))):
            yield prompt, part


def _padding(tokenizer: Any, ends: frozenset[int]) -> int:
    """The tokenizer's padding token unless that also ends answers; else the first special token that does not."""
    own = [tokenizer.pad_token_id, *tokenizer.all_special_ids, *sorted(tokenizer.added_tokens_decoder)]
    for token in own:
        if token is not None and token not in ends:
            return int(token)
    raise ValueError(
        "the tokenizer has no special token beside those that end an answer, so there is none to pad with; add one "
        "(tokenizer.add_special_tokens) and give the model a row for it"
    )
