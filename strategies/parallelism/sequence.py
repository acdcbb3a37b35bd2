"""Sequence and context parallelism: the ranks of a group compute parts of the same sequences.

Inside of the modules that are named each rank has a part of the sequence: at their inputs the sequence is cut, at their
outputs it is gathered. In between, attention sees all of it. With ``sp_size`` (Ulysses) one all-to-all exchanges parts
of the sequence for heads, and another one back; with ``cp_size`` an all-gather brings keys and values of all positions
to each rank's queries. Everything else must treat each position alone. Whether it does is tried: the first calls
compute the beginning of their sequences with and without cuts.

[Note: scale of gradients] FSDP averages gradients over all ranks, also over those of a group. What lies outside of the
modules computes the same on all ranks of a group, so that this is right. Inside, a rank has the gradient of its own
positions, and the sum over the group is right: what goes into the modules' backward is multiplied by the group's size,
what comes out of it is divided.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), which accelerate 1.15's ``sp_size`` has for DeepSpeed alone; the
all-gather of Llama 3 (arXiv 2407.21783, 3.3.2). torch 2.13's own ``context_parallel``, of accelerate's ``cp_size``, is
a prototype that no kernel of the CPU supports.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from ...checkpoint.names import clean_name
from ...state.process_group import is_planned
from ...state.utils import like_mapping
from ..common.grads import WHOLE, hook_leaf
from ..upstream.torch_core import all_gather_single, reduce_scatter_single, tree_leaves
from .config import matching, no_match

_TRIED_AT = (0, 16, 256)
"""Calls of a module that compute the beginning of their sequences in both ways: layers that begin as zeros hide what
comes before them."""
_TRIED_LENGTH = 16
"""Positions for each rank then, at most."""
_MOST_DIFFERENT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The allowed difference of outputs of both ways, relative to the largest: kernels add up in other orders."""
_MOST_DIFFERENT_IN_HALF = 5e-2
_IGNORED_LABEL = -100
"""torch's and transformers' label of positions without a loss."""
_FILLS = {"labels": _IGNORED_LABEL, "shift_labels": _IGNORED_LABEL, "attention_mask": 1}
"""The padding of sequences whose length cannot be divided, by names of arguments; others get 0."""


class SequenceParallel:
    """Cuts the sequences of modules over a group of ranks that see the same batches.

    Args:
        group: Of the ranks that share sequences.
        setting: Of `ParallelismConfig` that asks for it.
        patterns: (``fnmatch``) over the names of modules; None takes the causal language model of transformers.
    """

    def __init__(
        self, group: dist.ProcessGroup, setting: Literal["sp_size", "cp_size"], patterns: Sequence[str] | None
    ) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.setting, self._patterns = setting, patterns
        self.pieces = 1 if setting == "sp_size" else 2
        """Of which each rank's part consists. With two, one from the beginning and one from the end, causal attention
        takes all ranks the same time."""
        self.names: list[str] = []
        """Of the modules inside of which sequences are cut."""
        self.in_backward = False
        """Whether the strategy runs a backward, whose gradients FSDP averages."""
        self.after_trial: Callable[[], None] = lambda: None
        """Called to forget forwards that had no backward."""

    def apply(self, model: nn.Module) -> None:
        """Hook the modules.

        Raises:
            ValueError: If there are none, or one cannot compute a part of its sequence.
        """
        chosen = self._chosen(model)
        for name, module in chosen.items():
            inside = next((other for other in chosen if name.startswith(f"{other}.")), None)
            if inside is not None:
                raise ValueError(
                    f"sequence_modules: {name} lies inside of {inside}, which is cut already. Name one of them."
                )
            (_CausalRegion if _is_causal_model(module) else Region)(name, module, self).attach()
            self.names.append(name)

    def _chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        inner = {clean_name(name): name for name, _ in model.named_modules() if name}  # what wrappers wrap comes last
        modules = {name: model.get_submodule(full) for name, full in inner.items()}
        if self._patterns is None:
            found = {name: one for name, one in modules.items() if _is_causal_model(one)}
            if found:
                return found
            raise ValueError(
                f"{self.setting} > 1 needs the modules whose sequences it cuts: sequence_modules=['model.blocks'], "
                "with patterns over the names of model.named_modules(). Causal language models of transformers are "
                "found, and this module has none."
            )
        chosen: dict[str, nn.Module] = {}
        for pattern in self._patterns:
            matched = matching(pattern, modules)
            if not matched:
                raise no_match("sequence_modules", pattern, modules)
            chosen.update((name, modules[name]) for name in matched)
        return chosen

    @contextmanager
    def running_backward(self) -> Iterator[None]:
        """Run a backward of the strategy's."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    # ------------------------------------------------------------------ parts
    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of ``whole`` [batch, length, ...]."""
        pieces = whole.chunk(self.size * self.pieces, 1)
        if self.pieces == 1:
            return pieces[self.rank].contiguous()
        return torch.cat([pieces[self.rank], pieces[-1 - self.rank]], 1)

    def joined(self, parts: Tensor) -> Tensor:
        """Return the whole [batch, length, ...] of the ranks' ``parts`` [ranks, batch, part, ...]."""
        if self.pieces == 2:
            beginnings, ends = parts.chunk(2, 2)
            parts = torch.cat([beginnings, ends.flip(0)])
        return parts.transpose(0, 1).flatten(1, 2)

    def divided(self, whole: Tensor) -> Tensor:
        """Return the parts [ranks, batch, part, ...] of ``whole`` [batch, length, ...]."""
        pieces = torch.stack(whole.chunk(self.size * self.pieces, 1))
        return pieces if self.pieces == 1 else torch.cat([pieces[: self.size], pieces[self.size :].flip(0)], 2)

    def cut(self, whole: Tensor, padding: int, value: float) -> Tensor:
        """Return this rank's part of ``whole`` [batch, length, ...], made longer by ``padding``."""
        if padding:
            whole = functional.pad(whole, [0, 0] * (whole.ndim - 2) + [0, padding], value=value)
        return _apply(_Cut, whole, self)

    def gather(self, part: Tensor, length: int) -> Tensor:
        """Return the whole sequence [batch, length, ...] of the ranks' parts, without its padding."""
        return _apply(_Gather, part, self, False)[:, :length]

    def gather_for_own(self, part: Tensor) -> Tensor:
        """Return the whole [batch, length, ...] of which each rank makes another use."""
        return _apply(_Gather, part, self, True)

    def exchange(self, parts: Tensor) -> Tensor:
        """Send the i-th of ``parts`` [ranks, ...] to the i-th rank; return what all have sent here, in rank order."""
        return _apply(_Exchange, parts, self.group)

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over the ranks, whose gradient each of them has."""
        return _apply(_Sum, part, self)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts := parts.contiguous())
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Exchange, grads[0], ctx.group), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, parallel: SequenceParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.own(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Gather, grads[0] / ctx.parallel.size, ctx.parallel, False), None  # [Note: scale of gradients]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, parallel: SequenceParallel, for_own: bool) -> Tensor:
        ctx.parallel, ctx.for_own = parallel, for_own
        gathered = part.new_empty(parallel.size * part.shape[0], *part.shape[1:])
        all_gather_single(gathered, part.contiguous(), group=parallel.group)
        return parallel.joined(gathered.view(parallel.size, *part.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.for_own:
            return _apply(_SumForOwn, grads[0], ctx.parallel), None, None
        return _apply(_Cut, grads[0] * ctx.parallel.size, ctx.parallel), None, None  # [Note: scale of gradients]


class _SumForOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, parallel: SequenceParallel) -> Tensor:
        ctx.parallel = parallel
        parts = parallel.divided(whole)
        reduce_scatter_single(own := torch.empty_like(parts[0]), parts.flatten(0, 1), group=parallel.group)
        return own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Gather, grads[0], ctx.parallel, True), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, parallel: SequenceParallel) -> Tensor:
        ctx.size = parallel.size
        dist.all_reduce(total := part.clone(), group=parallel.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.size, None  # [Note: scale of gradients]


# ------------------------------------------------------------------------------------------------
# Attention over parts of a sequence.


class _Attention(TorchFunctionMode):
    """Lets each ``scaled_dot_product_attention`` see the whole sequence."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region, self._parallel = region, region.parallel

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if any(one.ndim != 4 for one in (query, key, value)) or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{self._region.name}: attention of {tuple(query.shape)} over {tuple(key.shape)} cannot be cut along "
                f"the sequence: {self._parallel.setting} > 1 takes self-attention of [batch, heads, length, size]. "
                "Leave the module out of sequence_modules."
            )
        self._region.check_attention(attn_mask, is_causal, query.shape[2])
        if attn_mask is not None:
            attn_mask = self._whole_mask(attn_mask, query.shape[2])

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, causal: bool = False) -> Tensor:
            return functional.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=enable_gqa
            )

        divided = self._by_heads if self._parallel.setting == "sp_size" else self._by_queries
        return divided(attend, query, key, value, attn_mask, is_causal)

    # ------------------------------------------------------------------ sp_size
    def _by_heads(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:  # fmt: skip
        ranks, rank, heads = self._parallel.size, self._parallel.rank, query.shape[1]
        if heads % ranks:
            raise ValueError(
                f"{self._region.name}: sp_size={ranks} does not divide the {heads} heads of its attention. "
                f"Set cp_size={ranks}, or a number that does."
            )
        if key.shape[1] % ranks:  # fewer keys and values than ranks: each rank needs those of its heads
            repeats = heads // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.narrow(-3, rank * (heads // ranks), heads // ranks)

        def exchanged(split: Tensor) -> Tensor:  # [ranks, batch, heads, part, size]
            return self._parallel.exchange(split).permute(1, 2, 0, 3, 4).flatten(2, 3)

        split = [torch.stack(one.chunk(ranks, 1)) for one in (query, key, value)]
        attended = attend(*_in_one(exchanged, split, 2, 1), mask, causal=is_causal)
        return self._parallel.exchange(torch.stack(attended.chunk(ranks, 2))).transpose(0, 1).flatten(1, 2)

    # ------------------------------------------------------------------ cp_size
    def _by_queries(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:  # fmt: skip
        def gathered(part: Tensor) -> Tensor:  # [batch, heads, part, size]
            return self._parallel.gather_for_own(part.transpose(1, 2)).transpose(1, 2)

        key, value = _in_one(gathered, [key, value], 1, 1)
        whole = key.shape[2]
        if not is_causal:
            if mask is not None and mask.shape[-2] > 1:
                mask = mask.index_select(-2, self._parallel.own(torch.arange(whole, device=mask.device)[None])[0])
            return attend(query, key, value, mask)
        attended, length = [], query.shape[2] // 2
        for piece, queries in zip((self._parallel.rank, -1 - self._parallel.rank), query.chunk(2, 2), strict=True):
            end = (piece % (2 * self._parallel.size) + 1) * length
            keys, values = key[:, :, :end], value[:, :, :end]
            bias = None if end == length else _lower_right(length, end, query.device)
            attended.append(attend(queries, keys, values, bias, causal=bias is None))
        return torch.cat(attended, 2)

    def _whole_mask(self, mask: Tensor, part: int) -> Tensor:
        ranks, whole = self._parallel.size, part * self._parallel.size
        queries, keys = mask.shape[-2], mask.shape[-1]
        if queries == 1 and keys == part:  # of keys alone, made from a part
            return self._parallel.gather_for_own(mask.movedim(-1, 1)).movedim(1, -1)
        if keys == part or not whole - 4 * ranks < keys <= whole or queries not in (1, keys):
            raise ValueError(
                f"{self._region.name}: attention with a mask of {tuple(mask.shape)} does not cover the sequence, of "
                f"which each rank has {part} positions. Make the mask, [batch, 1, length, length], outside of the "
                "module, and pass it as an argument."
            )
        missing, no = whole - keys, False if mask.dtype == torch.bool else float("-inf")
        if not missing:
            return mask
        mask = functional.pad(mask, [0, missing], value=no)
        if queries == 1:
            return mask
        everywhere = True if mask.dtype == torch.bool else 0.0  # a row without a key would be NaN
        return functional.pad(mask, [0, 0, 0, missing], value=everywhere)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last ``queries`` positions of ``keys``."""
    if device.type == "cpu":  # where torch 2.13's own makes this mask, too, and fails under dispatch modes
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    from torch.nn.attention.bias import causal_lower_right  # which takes a third of a second

    return causal_lower_right(queries, keys)


def _in_one(
    communicate: Callable[[Tensor], Tensor], tensors: Sequence[Tensor], dim: int, dim_after: int
) -> list[Tensor]:
    """Communicate several tensors, with one collective if they are alike but for one dimension."""
    if len({(one.shape[-1], one.dtype) for one in tensors}) > 1:
        return [communicate(one) for one in tensors]
    sizes = [one.shape[dim] for one in tensors]
    return list(torch.split_with_sizes(communicate(torch.cat(list(tensors), dim)), sizes, dim_after))


class _Trial(TorchFunctionMode):
    """Computes as if nothing was dropped and no linear layer was zero, which hides what comes before it."""

    _DROPS = frozenset(
        (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout,
         functional.alpha_dropout, functional.feature_alpha_dropout)
    )  # fmt: skip

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        if func is functional.linear and len(args) > 1 and not isinstance(args[1], DTensor) and not args[1].any():
            waves = torch.arange(args[1].numel(), device=args[1].device).cos().view_as(args[1])
            args = (args[0], waves.to(args[1].dtype) / args[1].shape[-1] ** 0.5, *args[2:])
        return func(*args, **kwargs)


# ------------------------------------------------------------------------------------------------
# Modules whose sequences are cut.


class Region:
    """A module with whole sequences outside and a part of each inside.

    Of its inputs, those tensors are cut whose second dimension is as long as that of the first one. Outputs are
    gathered along their second dimension.

    Args:
        name: For messages.
        module: Whose calls are cut.
        parallel: Over which ranks.
    """

    least = 1
    """Positions that each rank must have."""

    def __init__(self, name: str, module: nn.Module, parallel: SequenceParallel) -> None:
        self.name, self.module, self.parallel = name, module, parallel
        self._attention = _Attention(self)
        self._entered_by: nn.Module | None = None
        self._with_grad: list[bool] = []
        """Of each module around the one that runs, whether gradients were wanted when it was called."""
        self._calls: Counter[bool] = Counter()
        """In training, and in evaluation, which may not see the same positions (BatchNorm)."""
        self._is_whole, self._is_trial = False, False
        self._random = ExitStack()
        self.part = self.padding = 0
        """Positions of each rank, and how many of all are none, in the call that runs."""

    def __deepcopy__(self, memo: Any) -> Region:
        return self  # hooks of a copied module; whether it can be copied is for its shards to say

    def attach(self) -> None:
        """Hook the module, and those in it: what is recomputed in backward exchanges heads again."""
        self.module.register_forward_pre_hook(self._begin, with_kwargs=True)
        for inner in self.module.modules():
            inner.register_forward_pre_hook(self._enter)
            inner.register_forward_hook(self._exit, always_call=True)
        self.module.register_forward_hook(self._end, always_call=True)

    # ------------------------------------------------------------------ hooks
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = self.prepared(args, kwargs)
        if self._calls[module.training] in _TRIED_AT and not is_planned():  # a plan has no values
            self._try(args, kwargs)
        self._calls[module.training] += 1
        cut = self.cut(args, kwargs)
        if module.training:
            self._random.enter_context(_own_random_states(self.parallel.rank, _first(args, kwargs).device))
        return cut

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._random.close()
        try:
            return None if output is None else self.gathered(output)  # None: it has raised
        finally:
            self.padding = 0

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._with_grad.append(torch.is_grad_enabled())
        for parameter in module._parameters.values():  # unsharded now
            if parameter is not None and parameter.requires_grad and not hasattr(parameter, WHOLE):
                self._show_whole_gradients(parameter)
        if self._entered_by is None and not self._is_whole:
            self._attention.__enter__()  # type: ignore[no-untyped-call]
            self._entered_by = module

    def _show_whole_gradients(self, parameter: Any) -> None:
        """Give users' hooks, and ``torch.autograd.grad``, the gradient of whole sequences."""
        parallel, known = self.parallel, TensorWeakRef(parameter)

        def run(gradient: Tensor) -> Tensor | None:
            leaf = known()
            if parallel.in_backward and leaf is not None and len(leaf._backward_hooks) == 1:  # this one
                return None
            return parallel.sum(gradient) / parallel.size  # [Note: scale of gradients]

        hook_leaf(parameter, WHOLE, run)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._with_grad:
            self._with_grad.pop()
        if self._entered_by is module:
            self._attention.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._entered_by = None

    # ------------------------------------------------------------------ what is cut
    def prepared(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the inputs as they are before they are cut."""
        return args, kwargs

    def cut(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return this rank's part of the inputs."""
        length = _first(args, kwargs).shape[1]
        pieces = self.parallel.pieces
        self.part = max(-(-length // (self.parallel.size * pieces)) * pieces, self.least)
        self.padding = self.part * self.parallel.size - length

        def cut_one(name: str, whole: Tensor) -> Tensor:
            if whole.ndim < 2 or whole.shape[1] != length:
                return whole
            return self.parallel.cut(whole, self.padding, _FILLS.get(name, 0))

        return _mapped(args, cut_one), _mapped(kwargs, cut_one)

    def gathered(self, output: Any) -> Any:
        """Return whole outputs.

        Raises:
            ValueError: If they have no sequence.
        """
        for one in tree_leaves(output):
            if not isinstance(one, (Tensor, int, str, type(None))):
                raise ValueError(
                    f"{self.name} returns a {type(one).__name__}, which knows a part of the sequence alone. Return "
                    "tensors [batch, length, ...]."
                )

        def gather_one(name: str, part: Tensor) -> Tensor:
            if part.ndim < 2 or part.shape[1] != self.part:
                raise ValueError(
                    f"{self.name} returns a tensor of shape {tuple(part.shape)}, and its sequence has {self.part} "
                    "positions on this rank: the second dimension must be the sequence. Return the loss of each "
                    "position (reduction='none'), [batch, length], and average outside of the module."
                )
            return self.parallel.gather(part, self.part * self.parallel.size - self.padding)

        return _mapped(output, gather_one)

    def check_attention(self, mask: Tensor | None, is_causal: bool, part: int) -> None:
        """Check that a call of attention can be cut.

        Raises:
            ValueError: If padding, or a checkpoint, would make it wrong.
        """
        if self.padding and not is_causal and (mask is None or mask.shape[-1] == part):
            raise ValueError(
                f"{self.name}: {self.parallel.setting}={self.parallel.size} does not divide a sequence of "
                f"{self.part * self.parallel.size - self.padding} positions, and its attention, which is not causal, "
                "would see what fills it up. Fill the batch up to a multiple, with an attention mask."
            )
        if self._with_grad and self._with_grad[-1] and not torch.is_grad_enabled():
            raise ValueError(
                f"{self.name}: attention without gradients inside of a module that was called with them. If it is "
                "recomputed by torch.utils.checkpoint, set use_reentrant=False, or else call a module under no_grad()."
            )

    # ------------------------------------------------------------------ trial
    def _try(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Compute the beginning of the sequences whole and cut.

        Raises:
            RuntimeError: On every rank, if the outputs differ on any.
        """
        length = _first(args, kwargs).shape[1]
        limit = min(length, _TRIED_LENGTH * self.parallel.size)

        def shortened(name: str, whole: Tensor) -> Tensor:
            sequence = whole.ndim >= 2 and whole.shape[1] == length
            for dim in [1] if sequence else [dim for dim in (-2, -1) if whole.ndim > 2 and whole.shape[dim] == length]:
                whole = whole.narrow(dim, 0, limit)
            return whole

        args, kwargs = _mapped(args, shortened), _mapped(kwargs, shortened)
        device, module = _first(args, kwargs).device, self.module
        self._is_trial = True
        try:
            with torch.no_grad(), _forked_random_states(device), _kept_buffers(module), _Trial():
                self._is_whole = True
                try:
                    whole = module.forward(*args, **kwargs)
                finally:
                    self._is_whole = False
                args, kwargs = self.cut(args, kwargs)
                self._enter(module, ())
                try:
                    part = module.forward(*args, **kwargs)
                finally:
                    self._exit(module, (), None)
                found = self.gathered(part)
        finally:
            self._is_trial, self.padding = False, 0
            self.parallel.after_trial()
        differs = torch.zeros((), device=device)
        for expected, one in zip(tree_leaves(whole), tree_leaves(found), strict=True):
            if isinstance(expected, Tensor):
                differs += float(not _are_close(expected, one))
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        if differs:
            raise RuntimeError(
                f"{self.name} computes something else from parts of a sequence than from all of it, so that "
                f"{self.parallel.setting}={self.parallel.size} would train another model. Inside of it each position "
                "must be treated alone, except by torch's scaled_dot_product_attention: positions are arguments, not "
                "torch.arange() of the length; no nn.MultiheadAttention, convolution, BatchNorm or mean over the "
                "sequence; transformers with attn_implementation='sdpa' and without losses of experts. Change that, or "
                "name smaller modules in sequence_modules."
            )


class _CausalRegion(Region):
    """A causal language model of transformers: its loss is that of the whole sequence, its labels are shifted before.

    With labels it returns the loss, and no logits, which would be the largest tensor of all.
    """

    least = 2  # transformers takes one position for a step of generation, whose attention is not causal

    @override
    def attach(self) -> None:
        config: Any = self.module.config
        kind, layers = config._attn_implementation, set(getattr(config, "layer_types", None) or ())
        if kind != "sdpa":
            raise ValueError(
                f"{self.name} has attn_implementation={kind!r}, and {self.parallel.setting} > 1 cuts "
                "torch's scaled_dot_product_attention alone. Load it with attn_implementation='sdpa'."
            )
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                f"{self.name} adds a loss of its router over all positions, of which each rank has a part with "
                f"{self.parallel.setting} > 1. Set output_router_logits=False, or {self.parallel.setting}=1."
            )
        if layers - {"full_attention"}:
            raise ValueError(
                f"{self.name} has layers of {', '.join(sorted(layers))}: {self.parallel.setting} > 1 needs full "
                f"attention in each. Set {self.parallel.setting}=1, or tp_size."
            )
        heads = getattr(config, "num_attention_heads", self.parallel.size)
        if self.parallel.setting == "sp_size" and heads % self.parallel.size:
            raise ValueError(f"{self.name} has {heads} heads of attention, which sp_size={self.parallel.size} does not "
                             "divide.")  # fmt: skip
        self._signature = inspect.signature(self.module.forward)
        super().attach()

    @override
    def prepared(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        bound = self._signature.bind(*args, **kwargs).arguments
        given = {**{name: one for name, one in bound.items() if name != "kwargs"}, **bound.get("kwargs", {})}
        for name in ("past_key_values", "use_cache", "logits_to_keep", "output_attentions"):
            if given.get(name):
                raise ValueError(
                    f"{self.name}: {name} works on whole sequences, which no rank has with "
                    f"{self.parallel.setting} > 1. Leave it out; to generate, load the merged weights without it."
                )
        # First: `_first` finds them, and not the mask or the positions, which are before embeddings in the signature.
        given = {**{name: given[name] for name in ("input_ids", "inputs_embeds") if name in given}, **given}
        tokens = _first((), given)
        (batch, length), device = tokens.shape[:2], tokens.device
        config: Any = self.module.config
        cached = config.use_cache if given.get("use_cache") is None else False
        given.update(use_cache=False, return_dict=True)
        sliding = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
        mask = create_sliding_window_causal_mask if sliding else create_causal_mask
        given["attention_mask"] = mask(
            config=config,
            inputs_embeds=torch.empty(batch, length, 0, device=device, dtype=self.module.dtype),  # type: ignore[call-overload]
            attention_mask=given.get("attention_mask"),
            past_key_values=None,
            # Whose jumps separate packed sequences; to transformers 5.23 not in a model that makes a cache.
            position_ids=None if cached else given.get("position_ids"),
        )
        if given["attention_mask"] is None and self.parallel.pieces > 1:
            # Else transformers takes the jump of positions between the pieces for another packed sequence.
            given["attention_mask"] = torch.ones(batch, length, device=device, dtype=torch.bool)
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(length, device=device)[None]
        return (), given

    @override
    def cut(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if (labels := kwargs.get("labels")) is not None:
            shifted = kwargs.get("shift_labels")
            if shifted is None:
                shifted = functional.pad(labels, (0, 1), value=_IGNORED_LABEL)[:, 1:]
            kwargs = {**kwargs, "shift_labels": shifted}
            if kwargs.get("num_items_in_batch") is None:
                kwargs["num_items_in_batch"] = (shifted != _IGNORED_LABEL).sum()
        return super().cut(args, kwargs)

    @override
    def gathered(self, output: Any) -> Any:
        parts = {name: one for name, one in output.items() if one is not None}
        loss = parts.pop("loss", None)
        if loss is not None and not self._is_trial:
            parts.pop("logits", None)
        whole = super().gathered(parts)
        return type(output)(**whole, loss=None if loss is None else self.parallel.sum(loss))


# ------------------------------------------------------------------------------------------------
# Helpers.


def _is_causal_model(module: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers")
    is_theirs = transformers is not None and isinstance(module, transformers.PreTrainedModel)
    return is_theirs and type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _first(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.ndim > 1), None)
    if found is None:
        raise ValueError("A module of sequence_modules was called without a tensor [batch, length, ...] to cut.")
    return found


def _mapped(values: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return nested ``values`` with changed tensors; ``change`` gets the key of each."""
    if isinstance(values, Tensor):
        return change(name, values)
    if isinstance(values, Mapping):
        return like_mapping(values, {key: _mapped(one, change, str(key)) for key, one in values.items()})
    if isinstance(values, (tuple, list)):
        items = [_mapped(one, change, name) for one in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    return values


def _are_close(expected: Tensor, found: Any) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return bool((expected == found).all())
    most = _MOST_DIFFERENT.get(expected.dtype, _MOST_DIFFERENT_IN_HALF)
    scale = expected.abs().nan_to_num(posinf=0.0).max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=most * scale, equal_nan=True)


def _forked_random_states(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


@contextmanager
def _own_random_states(rank: int, device: torch.device) -> Iterator[None]:
    """Draw other numbers on each rank, and the same ones as the others again afterwards."""
    seed = int(torch.randint(2**31, ()))
    with _forked_random_states(device):
        torch.manual_seed(seed + rank)
        yield


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    kept = [(one, one.clone()) for one in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
