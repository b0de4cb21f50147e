"""The learner: packs rollouts, runs the aligned forward, the objective and the backward pass, steps, publishes.

Where several ranks train one model, this is one rank's part of it (`ranks.py`).

Its forward multiplies the very codes it published, so that what is trained is what was served. Shape letters:
B completions, L longest completion, S scored tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from qarl.checkpoint import load_tensors, save_tensors
from qarl.errors import ConfigurationError, RunError
from qarl.learner.adapted import Adapted
from qarl.learner.batch import MicroBatch, Share, divide, idle, pack, planned, shares_of, split_evenly, with_gradient
from qarl.learner.config import LearnerConfig
from qarl.learner.mismatch import mismatch_metrics
from qarl.learner.ranks import Alone, Ranks
from qarl.metrics import Last, Mean, Metrics, Sum, merge
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.models.load import load_folder
from qarl.models.parameters import EMBEDDING
from qarl.models.save import save_folder
from qarl.ops.device import moved
from qarl.ops.head import token_logprobs
from qarl.ops.kernels import kernels
from qarl.ops.operand import Operand, rounds_gradients
from qarl.ops.reference import Rounding
from qarl.optim.clipping import clip_grad_norm
from qarl.quant.formats import INT8, INT16, IntegerFormat
from qarl.quant.scheme import Scheme
from qarl.records import Advantages, Group, LossInputs, Snapshot
from qarl.roles import Objective
from qarl.sync.snapshot import operands_of, take_snapshot, unquantized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("qarl")

Alignment = Literal["auto", "none"]

MASTER, STATE = "master:", "optimizer:"
"""How the keys of `LocalLearner.state` begin, for a parameter and for a quantity of the optimizer's."""

GRIDS: Mapping[str, IntegerFormat | None] = {"auto": INT16, "int8": INT8, "fp32": None}
"""What `learner.gradients` rounds gradients to."""


class LocalLearner:
    """One model, on this process alone or on all `ranks`. `version` counts the rollout batches trained,
    `optimizer_steps` what this process made of them. `shares_kernels`: the engine that samples computes with the
    operations of this learner.
    """

    def __init__(
        self,
        config: LearnerConfig,
        decoder: Decoder,
        objective: Objective,
        schemes: Mapping[str, Scheme],
        alignment: Alignment,
        temperature: float,
        max_new_tokens: int,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        model_name: str = "",
        shares_kernels: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks: Ranks = Alone() if ranks is None else ranks
        self.config = config
        self.decoder = decoder
        self.objective = objective
        self.schemes = schemes
        self.alignment = alignment
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.total_steps = total_steps
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.shares_kernels = shares_kernels
        self.version = 0
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self._adapted = (
            Adapted(decoder, config.lora, schemes, alignment, seed, model_name) if config.lora is not None else None
        )
        self.optimizer = config.optimizer.build(self.trained().items(), config.lr, config.lr_scales)
        self._snapshot = self._requantize()
        self._started_with = self._snapshot.checksum if self._adapted is None else self._adapted.identity
        self._refuse_ignored_rounding()
        self._reference = self._initial_policy() if objective.needs_reference else None

    def publish(self) -> Snapshot:
        """The current weights, quantized once, or the adapters: the learner's own forward uses the same."""
        return self._snapshot

    def trained(self) -> dict[str, Tensor]:
        """What the optimizer changes, by name: the decoder's parameters, or adapters alone."""
        return dict(self.decoder.named_parameters()) if self._adapted is None else self._adapted.tensors()

    @torch.enable_grad()
    def update(self, groups: Sequence[Group], advantages: Advantages) -> Metrics:
        """Train on one rollout batch in `updates_per_batch` optimizer steps, over consecutive prompts.

        Completions with a NaN advantage are left out. RunError when tokens are not of the current version, or
        after too many updates in a row with a non-finite loss or gradient. Every rank is given the whole batch, takes
        its part of it, and returns the metrics of all.
        """
        self._check_versions(groups)
        updates = split_evenly(shares_of(groups, advantages), self.config.updates_per_batch)
        # What is skipped still counts in the loss's denominators: the gradient is that of all groups.
        computed = [with_gradient(shares) for shares in updates] if self._skips_equal_groups() else updates
        plans = [
            [planned(part, self.config.micro_batch_tokens) for part in divide(shares, self.ranks.count)]
            for shares in computed
        ]
        batches = [[self._packed(part) for part in plan[self.ranks.index]] for plan in plans]
        old = self._old_logprobs(batches)
        reports: list[Metrics] = []
        if not updates:
            log.warning("version %d: no completion has an advantage; nothing was trained", self.version)
            reports.append({"optim/grad_norm": Mean(0.0, 1.0)})
        published = self._snapshot
        for index, (shares, micros) in enumerate(zip(updates, batches, strict=True)):
            rounds = max(map(len, plans[index]))
            reports.append(self._optimizer_step(index, shares, micros, old[index], rounds))
            self._snapshot = self._requantize()
        self.version += 1
        # Requantizing made this snapshot before the batch counted as trained.
        self._snapshot = dataclasses.replace(self._snapshot, version=self.version)
        if self._adapted is not None:
            return merge(reports)  # the codes are the base's, which stay
        before, after = (operands_of(self.decoder, snapshot) for snapshot in (published, self._snapshot))
        return merge(reports) | {"quant/codes_flipped": codes_flipped(before, after)}

    def save(self, folder: Path) -> None:
        """Masters as a Hugging Face folder `model/`, or adapters as PEFT's `adapter/`; optimizer and counters too."""
        config = self.decoder.config
        if self._adapted is None:
            masters = {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}
            save_folder(
                folder / "model",
                config,
                masters,
                self.tokenizer,
                stop_token_ids=self.stop_token_ids,
                read=lambda name: self.ranks.fetch(f"{MASTER}{name}", masters[name]),
            )
        else:
            self._adapted.save(folder / "adapter", self._snapshot)
        tensors, scalars = self.optimizer.export_state()
        save_tensors(
            folder / "optimizer.safetensors", tensors, lambda name: self.ranks.fetch(f"{STATE}{name}", tensors[name])
        )
        state = {
            "version": self.version,
            "skipped_in_a_row": self.skipped_in_a_row,
            "started_with": self._started_with,
            "optimizer": scalars,
        }
        if self._adapted is not None:
            state["model"] = config.to_hf()
        (folder / "learner.json").write_text(json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote. RunError when it belongs to another model, base, KL reference or optimizer."""
        self.take_over(*self.read(folder))

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `save` wrote, counters and tensors by key, checked as `restore` does; nothing is changed."""
        state = json.loads((folder / "learner.json").read_text())
        if self._adapted is None:
            config, trained = load_folder(folder / "model")
        else:
            config = ModelConfig.from_hf(state["model"], str(folder / "learner.json"))
            trained = self._adapted.read(folder / "adapter")
        self._check_same_model(folder, config, state["started_with"])
        for name, parameter in self.trained().items():
            if parameter.shape != trained[name].shape:
                raise RunError(f"{folder}: {name} has shape {tuple(trained[name].shape)}, the model another")
        of_optimizer = load_tensors(folder / "optimizer.safetensors")
        self.optimizer.check_state(of_optimizer, state["optimizer"])
        tensors = {f"{MASTER}{name}": tensor for name, tensor in trained.items()}
        return state, tensors | {f"{STATE}{name}": tensor for name, tensor in of_optimizer.items()}

    @torch.no_grad()
    def take_over(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Be what `read` read, on every rank; `tensors` are empty on ranks that do not lead."""
        self.optimizer.allocate_state(state["optimizer"])
        for key, tensor in self.state().items():
            self.ranks.place(tensors.get(key), tensor)
        self.version, self.skipped_in_a_row = state["version"], state["skipped_in_a_row"]
        self._snapshot = self._requantize()

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by key; live tensors, of which a rank may hold a part."""
        masters = {f"{MASTER}{name}": parameter.detach() for name, parameter in self.trained().items()}
        of_optimizer, _ = self.optimizer.export_state()
        return masters | {f"{STATE}{name}": tensor for name, tensor in of_optimizer.items()}

    def logprobs(self, micro: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the scored tokens [S] under what this learner would train."""
        return score(self.decoder, micro, self.temperature, self.config, entropy_gradient)

    def _packed(self, shares: Sequence[Share]) -> MicroBatch:
        """A micro-batch where the decoder computes."""
        return moved(pack(shares), self.decoder.device)

    def _check_same_model(self, folder: Path, config: ModelConfig, started_with: str) -> None:
        """RunError where weights would go on in another network, or be held to another reference."""
        changed = [
            f"{field.name} = {new!r} (then {old!r})"
            for field in dataclasses.fields(config)
            if (old := getattr(config, field.name)) != (new := getattr(self.decoder.config, field.name))
        ]
        if changed:
            raise RunError(f"{folder}: was trained with another model configuration: now {', '.join(changed)}")
        if started_with == self._started_with or (self._reference is None and self._adapted is None):
            return
        role = "KL reference" if self._adapted is None else "base of the adapters"
        raise RunError(
            f"{folder}: the recipe's model has other weights than when the run started, and would be another {role}; "
            "put the old ones back, or name them as the recipe's model in a new run"
        )

    def _requantize(self) -> Snapshot:
        """Quantize the masters for publishing, and multiply with the result (or, unaligned, with the masters)."""
        if self._adapted is not None:
            return self._adapted.publish(self.version)
        snapshot = take_snapshot(self.decoder, self.schemes, self.version)
        table = snapshot.tensors[EMBEDDING]
        if self.alignment == "none":
            self.decoder.serve_masters(table)
        else:
            self.decoder.serve(operands_of(self.decoder, snapshot), table)
        return snapshot

    def _refuse_ignored_rounding(self) -> None:
        """ConfigurationError where gradients were asked to be rounded to 8 bits, and nothing is multiplied by codes."""
        operands = [projection.operand for projection in self.decoder.projections()]
        if self.config.gradients == "int8" and not any(x is not None and rounds_gradients(x) for x in operands):
            raise ConfigurationError(
                "learner.gradients = 'int8' has no effect here: it needs layers of an integer scheme (w8a8-int8, "
                "w4a8-int8), alignment = 'auto' and the C kernels (`qarl doctor`); leave it at 'auto'"
            )

    def _is_exact(self) -> bool:
        """Whether the engine's log-probabilities have the bits of this learner's."""
        return self.shares_kernels and self.alignment != "none" and kernels().exact_matmul

    def _initial_policy(self) -> Decoder:
        """A frozen copy of what this learner trains now: the served weights or, unaligned, the masters.

        Where adapters are trained it is their base, and no copy.
        """
        if self._adapted is not None:
            return self._adapted.without_adapters()
        aligned = self.alignment != "none"
        return frozen_copy(self.decoder, self._snapshot if aligned else take_snapshot(self.decoder, {}, self.version))

    def _skips_equal_groups(self) -> bool:
        if self.config.skip_equal_groups == "auto":
            return not (self.objective.needs_entropy or self.objective.needs_reference)
        return self.config.skip_equal_groups

    def _check_versions(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for completion in group.completions:
                if bool((completion.versions != self.version).any()):
                    raise RunError(
                        f"prompt {group.prompt.id}: tokens sampled by version {int(completion.versions.min())}, the "
                        f"learner has version {self.version}; stale rollouts need a correction that is not configured"
                    )

    def _old_logprobs(self, batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """The learner's log-probabilities before the first step, [B, L] per micro-batch.

        Where the two are exactly aligned, they are the engine's own; otherwise one more forward pass computes them,
        so that the ratio to them holds no mismatch.
        """
        if self._is_exact():
            return [[micro.engine_BL for micro in micros] for micros in batches]
        with torch.no_grad():
            return [[micro.frame(self.logprobs(micro)[0]) for micro in micros] for micros in batches]

    def _optimizer_step(
        self, index: int, shares: Sequence[Share], micros: Sequence[MicroBatch], old: Sequence[Tensor], rounds: int
    ) -> Metrics:
        """The update with this index in its batch; `rounds` micro-batches are those of the rank with the most."""
        self.optimizer.zero_grad()
        num_sequences = sum(len(share.samples) for share in shares)
        num_tokens = sum(len(sample.completion) for share in shares for sample in share.samples)
        reports = []
        for place, (micro, old_BL) in enumerate(zip(micros, old, strict=True)):
            self._round_gradients(index, place)
            reports.append(self._accumulate(micro, old_BL, num_sequences, num_tokens, is_first=index == 0))
        for place in range(len(micros), rounds):
            self._round_gradients(index, place)
            self._stand_by()
        found = merge([self.ranks.merged(merge(reports)), self._step()])
        if "objective/loss" in found:
            # The shares are added up to this update's loss: of several updates the mean is reported.
            found["objective/loss"] = Mean(found["objective/loss"].value(), 1.0)
        return found

    def _round_gradients(self, update: int, micro_batch: int) -> None:
        """Choose how the next backward pass rounds: dither is new in every pass, and the same in a resumed run."""
        grid = GRIDS[self.config.gradients]
        micro_batch = micro_batch * self.ranks.count + self.ranks.index
        for projection in self.decoder.projections():
            seed = dither_seed(self.version, update, micro_batch, projection.names[0])
            projection.rounding = None if grid is None else Rounding(grid, seed)

    def _accumulate(
        self, micro: MicroBatch, old_BL: Tensor, num_sequences: int, num_tokens: int, is_first: bool
    ) -> Metrics:
        """Forward, objective and backward of one micro-batch."""
        new_S, entropy_S = self.logprobs(micro, self.objective.needs_entropy)
        report = self.objective(
            LossInputs(
                new_BT=micro.frame(new_S),
                old_BT=old_BL,
                engine_BT=micro.engine_BL,
                advantages_B=micro.advantages_B,
                mask_BT=micro.mask_BL,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                max_new_tokens=self.max_new_tokens,
                entropy_BT=micro.frame(entropy_S),
                reference_BT=self._reference_logprobs(micro),
                tokens_BT=micro.tokens_BL,
            )
        )
        engine_S, is_exact = micro.engine_BL[micro.mask_BL], self._is_exact()
        self.ranks.agree(self._unequal(micro, new_S.detach(), engine_S) if is_exact and is_first else None)
        report.loss.backward()
        if is_exact and not is_first:
            return report.metrics  # the weights have moved since the rollout: this is no mismatch
        learner_S = new_S.detach() if is_exact else old_BL[micro.mask_BL]
        return report.metrics | mismatch_metrics(learner_S, engine_S)

    def _stand_by(self) -> None:
        """Add nothing to any gradient, in the steps in which other ranks add theirs."""
        new_S, _ = self.logprobs(moved(idle(), self.decoder.device))
        self.ranks.agree(None)
        (new_S.sum() * 0.0).backward()

    def _unequal(self, micro: MicroBatch, learner_S: Tensor, engine_S: Tensor) -> RunError | None:
        """What to say unless the bits agree: the engine's log-probabilities are taken for the old policy's."""
        differs_S = learner_S != engine_S
        if not bool(differs_S.any()):
            return None
        largest = float((learner_S - engine_S).abs().max())
        prompts = dict.fromkeys(micro.prompt_ids[sequence] for sequence in micro.sequence_S[differs_S].tolist())
        return RunError(
            f"version {self.version}: engine and learner promise equal log-probabilities, but of {len(engine_S)} "
            f"tokens {int(differs_S.sum())} differ, by up to {largest:.3g}, in completions of {len(prompts)} prompts, "
            f"the first of them {next(iter(prompts))}; `qarl align` finds the layer. Nothing was trained on them"
        )

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return micro.frame(score(self._reference, micro, self.temperature, self.config)[0])

    def _step(self) -> Metrics:
        """Clip and step, unless the gradient is not finite: then skip, and stop the run after too many."""
        factor = self.config.schedule(self.version, self.total_steps)
        self.optimizer.set_lr(factor)
        self.ranks.add_up(self.trained().values())
        norm = clip_grad_norm(self.trained().values(), self.config.max_grad_norm, self.ranks.norm_of)
        is_finite = math.isfinite(norm)
        if is_finite:
            self.optimizer_steps += 1
            self.optimizer.step()
        else:
            log.warning(
                "version %d: an update was skipped, its gradient is not finite (learner.lr, learner.max_grad_norm)",
                self.version,
            )
        self.optimizer.zero_grad()
        skipped = 0 if is_finite else self.skipped_in_a_row + 1
        if skipped > self.config.max_skipped_updates:
            raise RunError(
                f"{skipped} updates in a row had a non-finite gradient (learner.max_skipped_updates = "
                f"{self.config.max_skipped_updates}); the last batch is in completions/, the last good weights in "
                "checkpoints/"
            )
        self.skipped_in_a_row = skipped
        return {
            "optim/grad_norm": Mean(norm if is_finite else 0.0, float(is_finite)),
            "optim/skipped": Sum(float(not is_finite)),
            "optim/lr": Last(self.optimizer.lr),
        }


def score(
    decoder: Decoder, micro: MicroBatch, temperature: float, config: LearnerConfig, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a micro-batch's scored tokens [S] under the served weights."""
    recompute = config.activation_checkpointing and torch.is_grad_enabled()
    hidden = decoder.hidden(micro.token_ids_T, micro.positions_T, micro.spans, micro.longest, recompute)
    scored = hidden.index_select(0, micro.scored_rows_S)  # whose gradient is summed in order, unlike that of []
    return token_logprobs(
        decoder.head(), scored, micro.targets_S, temperature, config.head_chunk_tokens, entropy_gradient
    )


def frozen_copy(decoder: Decoder, snapshot: Snapshot) -> Decoder:
    """A decoder that goes on serving this snapshot: the reference policy of a KL penalty."""
    with torch.device("meta"):
        reference = Decoder(decoder.config, decoder.vocab_size, decoder.rounds_kv)
    own = {name: tensor.clone() for name, tensor in unquantized(snapshot).items()}
    reference.assign(own, requires_grad=False)
    reference.serve(operands_of(decoder, snapshot))
    return reference


def dither_seed(version: int, update: int, micro_batch: int, projection: str) -> int:
    """64 bits that belong to one projection in one backward pass."""
    text = f"{version}/{update}/{micro_batch}/{projection}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def codes_flipped(before: Mapping[str, Operand], after: Mapping[str, Operand]) -> Mean:
    """The share of weight codes that differ between two versions' operands."""
    quantized = [name for name, operand in after.items() if operand.num_codes]
    changed = sum(after[name].codes_changed(before[name]) for name in quantized)
    return Mean(changed, sum(after[name].num_codes for name in quantized))
