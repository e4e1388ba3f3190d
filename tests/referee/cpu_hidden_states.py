"""vLLM writes hidden states to files, without a GPU: loaded by the server as a connector, never imported by a test.

vLLM's own example connector copies through pinned memory on a CUDA stream while the server goes on. Here the copy is
made in place and written before the request counts as finished. For vLLM 0.32.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _AlreadyDone:
    """What the connector asks whether a copy has been made."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(example.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: example.PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        try:
            save_file(
                {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.contiguous()}, pending.filename
            )
        finally:
            os.close(self._lock_fds.pop(pending.req_id))  # its lock is what the reader waits for
        self._req_copy_events[pending.req_id] = _AlreadyDone()
