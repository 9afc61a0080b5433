"""From a policy to what vLLM loads: the whole model's weights, as a folder or as they are, or a folder of the adapter.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from groupline.models.load import save_model
from groupline.models.lora import Mirror


class Publisher:
    """Gives the policy's weights as they were at the last `refresh`, and knows the log-probs they give.

    folder: where they go, each version into a folder of its own; only the newest stays. adapter: write the LoRA adapter
    alone, on a base that the server has. dtype: number format of whole weights; the policy's own by default.
    """

    def __init__(
        self, policy: nn.Module, tokenizer: Any, folder: Path, adapter: bool, dtype: torch.dtype | None
    ) -> None:
        self.policy, self.tokenizer, self.folder, self.adapter = policy, tokenizer, folder, adapter
        self.mirror = Mirror(policy, dtype)
        kept = [name for name, module in self.mirror.model.named_modules() if isinstance(module, LoraLayer)]
        if kept and not adapter:
            raise ValueError(
                f"the adapter on {kept[0]} is not plain LoRA on a linear layer, so it cannot be folded into whole weights; "
                "use lora_targets of linear layers, or sampler: engine"
            )

    @property
    def model(self) -> Any:
        """The policy as the server runs it, adapters folded in."""
        return self.mirror.model

    def refresh(self) -> None:
        """Take the policy's weights as they are. Where ranks hold shares of them, every rank must call this."""
        self.mirror.refresh()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under the names of a checkpoint, each once."""
        own: dict[str, Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}
        yield from revert_weight_conversion(self.model, own).items()

    def outline(self) -> Path:
        """A folder with the model's configuration and tokenizer, without weights."""
        target = self.folder / "outline"
        self.model.config.save_pretrained(target)
        self.tokenizer.save_pretrained(target)
        return target.resolve()

    def publish(self, version: int) -> Path:
        """The folder that now holds this version."""
        target = self.folder / f"{'adapter' if self.adapter else 'weights'}-{version}"
        if self.adapter:
            assert isinstance(self.policy, PeftModel)
            shutil.rmtree(target, ignore_errors=True)
            with warnings.catch_warnings():  # peft looks for a base model's card on the hub, which may not be reached
                warnings.simplefilter("ignore")
                self.policy.save_pretrained(str(target))
        else:
            save_model(self.model, self.tokenizer, target)
        for path in self._folders():
            if path != target:
                shutil.rmtree(path)
        return target.resolve()

    def clear(self) -> None:
        """Remove every version."""
        for path in self._folders():
            shutil.rmtree(path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # unless the server's log is in it

    def _folders(self) -> list[Path]:
        return [p for kind in ("weights-*", "adapter-*", "outline") for p in self.folder.glob(kind) if p.is_dir()]

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> Tensor:
        """Log-prob [T] of each token of `answer` after the prompt, as published, at this temperature; fp32 on the CPU."""
        device = next(self.model.parameters()).device
        ids = torch.tensor([[*prompt, *answer]], device=device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # [T, V]
        logp = torch.log_softmax(logits / temperature, -1)
        return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
