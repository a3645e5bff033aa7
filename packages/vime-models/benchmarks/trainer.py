# SPDX-License-Identifier: Apache-2.0
"""A model with random weights, its optimizer and its data, as a trainer would hold them."""

from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from slices import PACKS, Case

from vime_models.dsv4.plugin import PLUGIN
from vime_models.host import cpu
from vime_replay.layout import PackLayout


class Trainer:
    """Training of one case.

    Args:
        case: what to build.
        config: the slice's `config.json`.
        device: "cuda", or "cpu" without an optimizer.
    """

    def __init__(self, case: Case, config: dict[str, Any], device: Literal["cpu", "cuda"]) -> None:
        self.case, self.device = case, device
        self.losses: list[torch.Tensor] = []
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.chunks = PLUGIN.build(
            config,
            dtype=dtype,
            device=device,
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=device == "cuda",
            **case.options,
        )
        for chunk in self.chunks:
            _fill_tables(chunk.train(), config)
        self.config = cast(Any, self.chunks[0]).config
        self.config.finalize_model_grads_func = finalize_model_grads
        on_gpu = device == "cuda"
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=on_gpu, use_distributed_optimizer=on_gpu
        )
        with cpu.cuda_literals_to_cpu():
            self.wrapped = [DistributedDataParallel(self.config, settings, chunk) for chunk in self.chunks]
        # As Megatron's trainer: only the last microbatch reduces.
        self.config.no_sync_func = self.wrapped[0].no_sync
        self.optimizer = self._optimizer() if device == "cuda" else None
        self._draw(config["vocab_size"])

    def _optimizer(self) -> Any:
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        optimizer = get_megatron_optimizer(settings, self.wrapped)
        # As Transformer Engine's norm, scaling and Adam, which Megatron takes where they are installed: few kernels,
        # and no tensor is waited for by itself.
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in part.optimizer.param_groups:
                group |= {"fused": True, "foreach": False}
        return optimizer

    def _draw(self, vocabulary: int) -> None:
        lengths = PACKS[self.case.pack]
        layout = PackLayout(
            lengths,
            mode=self.config.vime_dsv4.cp_layout,
            query_order="balanced" if self.config.vime_dsv4.cp_balance else "contiguous",
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )
        generator = torch.Generator().manual_seed(1 + parallel_state.get_data_parallel_rank())
        ids = torch.randint(vocabulary, (1, layout.total + 1), generator=generator)
        rows = torch.from_numpy(layout.rows("local"))
        self.ids, self.labels = (part[:, rows].to(self.device) for part in (ids[:, :-1], ids[:, 1:]))
        cu_seqlens = torch.from_numpy(layout.cu_seqlens).to(self.device)
        self.packing = partial(
            PackedSeqParams, qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
        self.rows = layout.total
        self.packs_per_step = self.case.microbatches * parallel_state.get_data_parallel_world_size()
        self.tokens_per_step = self.packs_per_step * layout.total

    def step(self) -> None:
        """Forward, backward, reduction of gradients, update."""
        self._forward_backward()
        if self.optimizer is not None:
            self.update()

    def update(self) -> None:
        """Of the parameters, from whatever gradients there are."""
        self.optimizer.step()

    @property
    def loss(self) -> float:
        """Of the last step, NaN before the last stage. Every rank must ask, after the step: it waits for the device."""
        if not self.losses:
            return float("nan")
        mean = torch.stack(self.losses).mean()
        dist.all_reduce(mean, group=parallel_state.get_context_parallel_group())
        return mean.item()

    def _forward_backward(self) -> None:
        losses: list[torch.Tensor] = []

        def forward_step(_queue: Any, model: Any) -> Any:
            output = model(self.ids, None, None, labels=self.labels, packed_seq_params=self.packing())

            def loss(per_token: torch.Tensor) -> Any:
                part = per_token.sum() / self.rows
                losses.append(part.detach().clone())
                return part, {}

            return output, loss

        with cpu.cuda_literals_to_cpu():
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(()),
                model=self.wrapped[0],
                num_microbatches=self.case.microbatches,
                seq_length=self.rows,
                micro_batch_size=1,
            )
        self.losses = losses


def _norm(_chunk: int, _flag: Any, tensors: list[Any], _per_tensor: bool) -> tuple[torch.Tensor, None]:
    return torch.stack(torch._foreach_norm(tensors[0])).norm().view(1), None


def _scale(_chunk: int, _flag: Any, tensors: list[Any], factor: float) -> None:
    torch._foreach_mul_(tensors[1], factor)


def _fill_tables(chunk: torch.nn.Module, config: dict[str, Any]) -> None:
    """Tables of hash layers: distinct experts for every token id."""
    generator = torch.Generator().manual_seed(0)
    for name, buffer in chunk.named_buffers():
        if name.endswith("tid2eid"):
            scores = torch.rand(len(buffer), config["n_routed_experts"], generator=generator)
            buffer.copy_(scores.topk(config["num_experts_per_tok"]).indices)
