"""From a configuration to everything the loop needs, checked before the first token, and the plan in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from groupline.batch import automatic_tokens
from groupline.config import Config, ConfigError, Positive
from groupline.models.load import Precision, choose_precision, load_model, load_tokenizer
from groupline.models.lora import add_lora, fuse_lora, is_peft
from groupline.models.reference import Reference
from groupline.objective import Objective, get_objective
from groupline.parallel.mesh import SOLO, World
from groupline.records import SamplingParams
from groupline.rewards import Judging, Reward, reward_notes
from groupline.rewards.columns import column_names
from groupline.sampling import Sampler
from groupline.tasks.source import given_problems, held_out_problems, training_problems
from groupline.training import ahead
from groupline.training.collect import ProblemStream, Prompted, Stream, encode_problems
from groupline.training.judges import check_gold, judges_of
from groupline.training.optim import Optimiser
from groupline.training.samplers import differing_defaults, make_sampler
from groupline.training.step import Scorer

MOST_PROBLEMS = 20000  # taken from a generated task


class PlannedConfig(Config):
    """A configuration whose open choices are made."""

    micro_batch_tokens: Positive


@dataclass
class Setup:
    """Everything one run works with."""

    config: PlannedConfig
    precision: Precision
    tokenizer: Any
    policy: nn.Module
    reference: Reference | None
    objective: Objective
    rewards: list[Reward]
    stream: Stream
    held_out: list[Prompted]
    dropped: int
    sampling: SamplingParams
    eval_sampling: SamplingParams
    engine: Sampler
    optimiser: Optimiser
    scorer: Scorer
    why_tokens: str  # why so many as config.micro_batch_tokens
    plan: str = ""
    tokens_seen: int = 0
    world: World = SOLO
    passed_in: bool = False  # whether the model was, so that no name leads to its starting weights

    def line(self, m: dict[str, Any]) -> str:
        """One step in one line. The loss is not in it: on policy it stands near zero whatever is learned."""
        width = len(str(self.config.steps))
        kl = f"  kl {m['kl']:.4f}" if "kl" in m else ""
        return (
            f"step {m['step']:>{width}}/{self.config.steps}  reward {m['reward']:.3f}  right {m['accuracy']:6.1%}  "
            f"groups with signal {m['frac_groups_with_signal']:4.0%}  length {m['completions/mean_length']:5.1f}{kl}  "
            f"grad {m['grad_norm']:.3f}  {m['step_time']:.1f} s (generate {m['time/generate']:.1f}, "
            f"train {m['time/train']:.1f})"
        )


def prepare(
    config: Config,
    say: Callable[[str], None] = print,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    rewards: Sequence[Reward] | None = None,
    problems: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    objective: Objective | None = None,
    stream: Stream | None = None,
) -> Setup:
    """Load, check and connect. Raises before any training; every message names what to change.

    objective: in place of the row that the configuration names. stream: prompts that are encoded already, in an order
    of their own, in place of `problems`.
    """
    objective = objective or objective_of(config)
    if config.prompts_per_step * config.num_generations % config.updates_per_pass:
        raise ConfigError(
            f"updates_per_pass is {config.updates_per_pass}; it must divide the {config.prompts_per_step} x "
            f"{config.num_generations} answers of a step"
        )
    if objective.kl_place == "reward" and objective.beta > 0 and sampling_of(config).filters:
        raise ConfigError(
            f"objective {objective.name} takes its KL from the sampler's log-probs, and top_p, top_k or min_p make those "
            "another distribution's; use no filter, or beta: 0"
        )
    precision = choose_precision(config.device, config.precision)
    judges = judges_of(config, rewards)
    ahead.check_staleness(config, objective, judges)
    Judging(judges)  # raises for what could not be called later
    wanted = min(MOST_PROBLEMS, config.steps * config.prompts_per_step)
    if stream is not None:
        train_on = [p.problem for p in stream.prompted]
    else:
        train_on = training_problems(config, wanted) if problems is None else given_problems(config, problems)
    measure_on = (
        held_out_problems(config, config.eval_problems) if held_out is None else given_problems(config, held_out)
    )
    if not train_on:
        raise ConfigError("there are no problems to train on: `problems` is empty")
    for asked in (train_on, measure_on):
        column_names(asked, ("prefill",))  # raises for what reward functions could not be given
    check_gold(judges, [*train_on, *measure_on])
    tokenizer = tokenizer or load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    passed_in = model is not None
    policy: Any = model if model is not None else load_model(config.model, trust_remote_code=config.trust_remote_code)
    policy = policy.to(precision.device)
    limit = prompt_limit(config, policy)
    dropped = 0
    if stream is None:
        prompted, dropped = encode_problems(train_on, tokenizer, config, limit)
        stream = ProblemStream(prompted, config.seed)
    held, dropped_held = encode_problems(measure_on, tokenizer, config, limit)
    fresh = config.lora_r > 0
    if fresh:
        if passed_in and is_peft(policy):
            raise ConfigError(
                "lora_r is set, but the model passed in already has an adapter; set lora_r: 0 to train it"
            )
        torch.manual_seed(config.seed)
        policy = add_lora(policy, config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets)
    elif is_peft(policy):
        fuse_lora(policy)
    policy.eval()  # no dropout in sampling, reference and old log-probs; the adapter's own is switched on below
    for name, module in policy.named_modules():
        if config.lora_dropout and "lora_dropout" in name:
            module.train()
    optimiser = Optimiser(
        policy, config, config.steps * config.num_iterations * config.updates_per_pass, precision.scale_gradients
    )
    reference = Reference(policy, fresh) if objective.beta > 0 else None
    engine = make_sampler(config, policy, tokenizer, precision, say, config.output_dir, not passed_in)
    scorer, reason = Scorer.for_model(policy, config.temperature, precision.compute)
    if reason:
        say(f"training on padded rows, the prompt repeated for every answer: {reason}")
    longest = max(len(p.ids) for p in stream.prompted)
    tokens, why_tokens = row_tokens(config, policy, precision, longest, scorer.shared)
    planned = cast(PlannedConfig, config.model_copy(update={"micro_batch_tokens": tokens}))
    setup = Setup(
        planned, precision, tokenizer, policy, reference, objective, judges, stream, held,
        dropped + dropped_held, sampling_of(config), eval_sampling_of(config), engine, optimiser, scorer,
        why_tokens, passed_in=passed_in,
    )  # fmt: skip
    setup.plan = describe(setup)
    return setup


def objective_of(config: Config, row: Objective | None = None) -> Objective:
    """The row, by default the one that is named, with the configuration's changes.

    ConfigError: what the row cannot be changed to, and settings of a KL penalty that has no weight.
    """
    changes: dict[str, Any] = {
        "clip_low": config.epsilon,
        "clip_high": config.epsilon_high if config.epsilon_high is not None else config.epsilon,
        "delta": config.delta,
        "scale": config.scale_rewards,
        "ddof": config.ddof,
        "mask_truncated": config.mask_truncated_completions,
        "top_entropy": config.top_entropy_quantile,
        "beta": config.beta,
        "kl": config.kl,
        "kl_place": config.kl_place,
    }
    try:
        row = row or get_objective(config.objective)
        if config.beta and row.kl == "none" and config.kl is None:
            changes["kl"] = "k3"
        changed = row.replace(**{k: v for k, v in changes.items() if v is not None})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    idle = [name for name in ("kl", "kl_place") if getattr(config, name) is not None]
    if idle and changed.beta == 0:
        raise ConfigError(
            f"{' and '.join(idle)} would change nothing, as beta is 0 "
            f"({f'the default of {row.name}' if config.beta is None else 'as set'}); set beta above 0, or leave "
            f"{'it' if len(idle) == 1 else 'them'} out"
        )
    return changed


def sampling_of(config: Config) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_new_tokens=config.max_completion_length,
        stop=config.stop,
    )


def eval_sampling_of(config: Config) -> SamplingParams:
    """Held-out answers are drawn from the whole distribution at `eval_temperature`."""
    return SamplingParams(
        temperature=config.eval_temperature, max_new_tokens=config.max_completion_length, stop=config.stop
    )


def prompt_limit(config: Config, model: Any) -> int | None:
    """Most prompt tokens: the setting, and what the model's positions leave beside a full answer."""
    positions = getattr(model.config, "max_position_embeddings", None)
    room = None if positions is None else positions - config.max_completion_length
    if room is not None and room < 1:
        raise ConfigError(
            f"max_completion_length is {config.max_completion_length} and the model has {positions} positions; "
            "leave room for the prompt"
        )
    limits = [x for x in (config.max_prompt_length, room) if x is not None]
    return min(limits, default=None)


def row_tokens(
    config: Config, policy: nn.Module, precision: Precision, longest: int, shared: bool, free: int | None = None
) -> tuple[int, str]:
    """(row tokens of a micro-batch, why so many). longest: tokens of the longest prompt. free: see `automatic_tokens`."""
    if config.micro_batch_tokens is not None:
        return config.micro_batch_tokens, "as set"
    answers, most = config.num_generations, config.max_completion_length
    group = longest + answers * most
    padding = 1.0 if shared else answers * (longest + most) / group  # the prompt is repeated in any case
    whole = group if shared else 0
    return automatic_tokens(policy, precision.device, precision.compute, group=whole, padding=padding, free=free)


def describe(setup: Setup) -> str:
    """The plan: what will be done, how much of it, where, and why so."""
    c, o = setup.config, setup.objective
    answers = c.prompts_per_step * c.num_generations
    longest = max(len(p.ids) for p in setup.stream.prompted)
    most = c.prompts_per_step * longest + answers * c.max_completion_length
    every = sum(p.numel() for p in setup.policy.parameters())
    trained = sum(p.numel() for p in setup.optimiser.parameters)
    passes = c.num_iterations * c.updates_per_pass
    reference = "none (beta 0)" if setup.reference is None else f"{setup.reference.kind}, beta {o.beta:g} on {o.kl}"
    clip = f"clip {o.clip_low if o.clip_low is not None else '-'}/{o.clip_high if o.clip_high is not None else '-'}"
    rows = [
        ("model", f"{'passed in' if setup.passed_in else c.model}: {every:,} weights, {trained:,} trained"),
        ("device", str(setup.precision) + setup.world.words),
        ("problems", f"{len(setup.stream.prompted)} to train on, {len(setup.held_out)} held out, {setup.dropped} too long"),
        ("a step", f"{c.prompts_per_step} prompts x {c.num_generations} answers = {answers} answers; at most {most:,} "
                   f"row tokens in {-(-most // c.micro_batch_tokens)} micro-batches"),
        ("memory", f"at most {c.micro_batch_tokens:,} row tokens a micro-batch ({setup.why_tokens})"),
        ("updates", f"{c.steps} steps x {passes} = {c.steps * passes}; at most "
                    f"{c.steps * answers * c.max_completion_length:,} new tokens"),
        ("objective", f"{o.name}: baseline {o.baseline}, scale {o.scale} (ddof {o.ddof}), ratio {o.ratio}, {clip}, "
                      f"weight {o.token_weight}"),
        ("reference", reference),
        ("rewards", ", ".join(f"{r.weight:g} x {r.name}" for r in setup.rewards)),
        ("held out", f"{len(setup.held_out)} problems x {c.eval_samples} answers at temperature {c.eval_temperature:g}"),
        ("writes to", c.output_dir),
    ]  # fmt: skip
    if c.staleness:
        rows.insert(4, ("ahead", ahead.words(c)))
    note = [f"      note  {line}" for line in reward_notes(setup.rewards)] + differing_defaults(
        setup.policy, setup.sampling
    )
    return "\n".join([*(f"{name:>10}  {text}" for name, text in rows), *note])
