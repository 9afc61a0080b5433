"""Two backends of vLLM's weight-transfer interface: safetensors from a folder both sides see, and tensors of this process.

vLLM's own backends (NCCL, CUDA IPC, RDMA) need GPUs. The first needs a file system: the server is started with
`--worker-extension-cls groupline_vllm_weights.WeightFiles --weight-transfer-config '{"backend": "groupline_files"}'`,
and gets new weights by start_weight_update, update_weights({"folder": ...}) and finish_weight_update. The second,
`groupline_tensors`, is for vLLM inside the trainer's process, where update_weights({"tensors": ...}) passes them as they are.
Written against vLLM 0.32.0: vllm/distributed/weight_transfer/base.py and ipc_engine.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

FILES, TENSORS = "groupline_files", "groupline_tensors"


@dataclass
class FilesInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """folder: holds the whole model's *.safetensors, under the names of a checkpoint."""

    folder: str

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _tensors(Path(self.folder))


@dataclass
class TensorsUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """tensors: the whole model's weights, under the names of a checkpoint."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    folder: str = "the trainer"

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)


class FilesEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads whole checkpoints in place, layer by layer, as vLLM's IPC engine does."""

    init_info_cls = FilesInit
    update_info_cls: type[FilesUpdate | TensorsUpdate] = FilesUpdate

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Looked at while the model is whole: an update takes it apart, and then a tied head seems a weight of its own.
        self.wanted = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        owners: dict[int, list[torch.nn.Module]] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        self.tied = [module for sharing in owners.values() for module in sharing[1:]]

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """As in the base class, without its wait for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FilesUpdate | TensorsUpdate) -> None:
        """Raises ValueError, naming them, if the folder lacks some of the model's weights; the model is then unusable, and
        the next update starts anew.
        """
        try:
            self._load(update_info)
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)  # or half a layer would wait for its other half
            raise

    def _load(self, update_info: FilesUpdate | TensorsUpdate) -> None:
        loaded = self.model.load_weights(update_info.pairs())
        missing = sorted(self.wanted - loaded) if loaded is not None else []
        if missing:
            raise ValueError(
                f"{update_info.folder} lacks {len(missing)} weights of the model: {', '.join(missing[:8])}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A layer that shares its weight gets none of its own from a checkpoint, so vLLM does not process it again, and on
        # a CPU a tied head would go on with the weight that was packed for its product before.
        for layer in self.tied:
            method = getattr(layer, "quant_method", None)
            if method is not None and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


class TensorsEngine(FilesEngine):
    """The same, of tensors that are handed over by a call."""

    update_info_cls = TensorsUpdate


class WeightFiles:
    """The worker extension: that it is imported registers the backends; it adds nothing to the worker."""


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    for file in files:
        with safe_open(str(file), "pt") as stream:
            for name in stream.keys():  # noqa: SIM118 - not a mapping
                yield name, stream.get_tensor(name)


for name, engine in ((FILES, FilesEngine), (TENSORS, TensorsEngine)):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)
