"""Single lines of users' code, each of which trains as under ddp, or is refused by name.

The names in them: ``s`` the LightningModule, ``m`` a linear layer inside a unit, ``w`` its weight, ``ps`` all
parameters, ``o`` the optimizer, ``groups`` the parameters of its first group, ``see`` records a number that must be
ddp's.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.strategies.trained_patterns import problems
from tests.strategies.user_patterns import (
    FLAT_WEIGHTS,
    MOVED,
    NO_STATES,
    PATTERNS,
    TRANSFORMED,
    Entry,
    ManualPattern,
    Pattern,
    Refused,
)

IN_HOOKS = r"""
torch.mul(w, 0.9, out=w)
torch.mul(w, 0.9, out=m.bias.new_empty(w.shape))
m.weight += 0.01
m.weight *= 0.9
m.weight.data *= 0.9
m.weight.data += 0.01 * torch.ones_like(m.weight)
m.bias.data -= 0.1
w.data = w.data * 0.9
w[w.abs() < 0.1] = 0
w[w.abs() < 0.1] *= 0.5
w[[0, 2]] *= 0.5
w[:, [0, 1]] = w[:, [1, 0]]
w[..., 0] = 0.1
w[1:3, ::2] += 0.1
w[-1] = w[0]
w[0, 0] = 1.5
w[torch.arange(2), torch.arange(2)] += 0.3
w.view(-1)[3] = 1.0
w.flatten()[3] = 1.0
w.reshape(-1)[2:5].zero_()
w.unsqueeze(0).mul_(0.9)
w.t()[0] = 0.2
w.T.mul_(0.9)
w.mT[1].fill_(0.1)
w.narrow(0, 1, 2).zero_()
w.select(0, 1).mul_(0.1)
[r.mul_(0.9) for r in w]
[r.mul_(0.1 * i) for i, r in enumerate(torch.unbind(w))]
[c.zero_() for c in torch.tensor_split(w, 3)[1:]]
w.split(2)[0].mul_(0.5)
w.chunk(2, 1)[1].mul_(0.5)
w.diagonal().fill_(0.5)
w.fill_diagonal_(0.5)
w.tril_()
w.triu_(1)
w.index_fill_(0, torch.tensor([0, 1]), 0.1)
w.index_add_(0, torch.tensor([0, 1]), torch.ones(2, w.shape[1]))
w.index_copy_(0, torch.tensor([1]), torch.ones(1, w.shape[1]))
w.scatter_(1, torch.zeros(w.shape[0], 1, dtype=torch.long), 0.3)
w.scatter_add_(1, torch.zeros(w.shape[0], 1, dtype=torch.long), torch.ones(w.shape[0], 1))
w.masked_fill_(w < 0, 0.1)
w.masked_scatter_(w < 0, torch.ones_like(w))
w.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(2.0), accumulate=True)
w.put_(torch.tensor([0, 3]), torch.tensor([1.0, 2.0]))
w.copy_(w.flip(0))
w.copy_(torch.roll(w, 1, 0))
w.lerp_(torch.ones_like(w), 0.1)
w.addcmul_(w, w, value=0.1)
w.addmm_(w @ w.T, w, alpha=0.01)
w.addr_(w[:, 0].clone(), w[0].clone(), alpha=0.01)
w.clamp_(min=torch.full_like(w, -0.1))
w.renorm_(2, 0, 0.5)
w.pow_(2)
w.sigmoid_()
w.zero_()
w.nan_to_num_()
w.swapaxes(0, 1)[0] = 0.1
w.movedim(0, 1)[0] = 0.1
w.squeeze().mul_(0.9)
w.unflatten(0, (2, -1))[0].mul_(0.5)
w.as_strided((2, 2), (w.shape[1], 1)).mul_(0.5)
w.expand_as(w).mul_(0.9)
w.real.mul_(0.9)
w.view_as(w).mul_(0.9)
w.detach().mul_(0.9)
w.detach().clone().mul_(0.9)
w.data[0].mul_(0.9)
w.data.view(-1)[0] = 3.0
w.detach().numpy()[0] = 0.25
np.multiply(w.detach().numpy(), 0.5, out=w.detach().numpy())
np.asarray(w.detach())[1] *= 0.5
torch.from_numpy(w.detach().numpy()).mul_(0.9)
s.k = getattr(s, "k", np.asarray(w.detach(), dtype=np.float64)); s.k *= 0.5; see(s.k.sum())
torch.from_dlpack(w.detach()).mul_(0.9)
torch._foreach_mul_(ps, 0.9)
torch._foreach_add_(ps, [p.sign() for p in ps], alpha=-0.01)
torch._foreach_copy_(ps, [p * 0.9 for p in ps])
torch._foreach_lerp_(ps, [torch.zeros_like(p) for p in ps], 0.1)
torch._foreach_zero_(ps[:1])
nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(3))
nn.init.eye_(w)
w.normal_(generator=torch.Generator().manual_seed(3))
w.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(3))
w.bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
w.add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)
see(np.histogram(w.detach().cpu().numpy(), bins=4)[0][1])
see((w @ w.T).trace())
see(torch.einsum("ij,kj->ik", w, w).sum())
see(functional.linear(torch.ones(1, w.shape[1]), w, m.bias).sum())
see(functional.cosine_similarity(w, s.model.blocks[1].up.weight).sum())
see(torch.cdist(w, w).sum())
see(functional.normalize(w)[0, 1])
see(w.topk(2).values.sum())
see(w.sort(0).values[1].sum())
see(w.argmax())
see(torch.histc(w, 4)[2])
see(torch.linalg.svdvals(w)[0])
see(torch.linalg.matrix_norm(w, 2))
see(torch.linalg.qr(w)[1].abs().sum())
see(torch.linalg.pinv(w).sum())
see(torch.cov(w).sum())
see(torch.corrcoef(w).sum())
see(w.cumsum(0)[2].sum())
see(w.kthvalue(2).values.sum())
see(w.median() + w.mode().values.sum())
see(w.unique().numel())
see(w.nonzero().sum())
see(torch.count_nonzero(w > 0))
see(torch.any(w.isnan()) + torch.all(w.isfinite()))
see(torch.allclose(w, w * 1.0) and not torch.equal(w, w * 2))
see(torch.stack([p.norm() for p in ps]).norm())
see(torch.cat([p.flatten() for p in ps]).std())
see(torch.nn.utils.parameters_to_vector(ps)[3])
see(torch.stack(torch._foreach_norm(ps)).norm())
see(w.tolist()[0][1] + w[0, 0].item() + float(w.max()) + int(w.shape[0]))
see(max(w.flatten().tolist()) + sum(w.sum(0)))
see(w.var(dim=0).sum() + w.std())
see(torch.quantile(w, 0.3))
see(torch.logsumexp(w, 1).sum() + w.softmax(-1)[0, 0] + w.log_softmax(0)[1, 1])
see(w.prod(0).sum() + w.amax() + w.aminmax()[0])
see(torch.bucketize(w, torch.linspace(-1, 1, 5)).sum())
see(torch.where(w > 0, w, 0).sum() + torch.max(w, w.T.reshape(w.shape)).sum())
see(torch.multinomial(w.abs().flatten(), 1, generator=torch.Generator().manual_seed(1)))
see(w.repeat(2, 1)[w.shape[0]].sum() + w.repeat_interleave(2, 0)[1].sum() + w.tile(2)[0, 0])
see(torch.kron(w[:2], w[:2]).sum() + torch.outer(w[0], w[1]).sum() + w[0].dot(w[1]))
see(w.new_zeros(2).sum() + torch.empty_like(w).numel() + torch.full_like(w, 2).sum())
see(functional.conv1d(torch.ones(1, 1, 8), w[:1].unsqueeze(0)[..., :3]).sum())
see(functional.embedding(torch.tensor([0, 2]), w).sum())
see(functional.dropout(w, 0.0).sum() + functional.relu(w).sum() + functional.mse_loss(w, torch.zeros_like(w)))
see(torch.diff(w, dim=0).abs().mean() + torch.gradient(w)[0][0, 0] + torch.trapz(w, dim=1)[0])
see(torch.func.vmap(torch.norm)(w).sum())
see(torch.fft.rfft(w)[0, 0].real)
k = nn.Parameter(w.data); k.mul_(0.9)
k = nn.Parameter(w.clone()); k.mul_(0.9); see(k.sum())
k = torch.as_tensor(w); k.mul_(0.9)
k = torch.tensor(w.tolist()); see(k.sum())
k = w.contiguous().mul_(0.9)
k = w.to(torch.float32).mul_(0.9)
k = w.cpu().mul_(0.9)
k = w.float().mul_(0.9)
s.model.to(s.device)
s.model.float()
s.to(torch.float32)
s.model.cpu()
s.model.double().float()
s.model.requires_grad_(True)
s.model.zero_grad()
s.zero_grad(set_to_none=False)
s.model.train().eval(); s.model.train()
[q.mul_(0.9) for q in s.model.parameters()]
[q.mul_(0.9) for n, q in s.named_parameters() if n.endswith("bias")]
[q.data.clamp_(-0.1, 0.1) for q in groups]
[v.mul_(0.9) for v in s.model.state_dict().values()]
s.model.load_state_dict({k: v * 0.9 for k, v in s.model.state_dict().items()})
m.load_state_dict({"weight": m.weight * 0.9, "bias": m.bias})
s.load_state_dict({k: v for k, v in s.state_dict().items() if "bias" in k}, strict=False)
s.model.blocks[0].load_state_dict(s.model.blocks[1].state_dict())
s.model.blocks[1].up.weight.copy_(w)
s.model.blocks[1].up.weight.data.copy_(w.data)
see(s.model.blocks[0](torch.ones(2, w.shape[1])).sum())
see(m(torch.ones(2, w.shape[1])).sum())
see(m.forward(torch.ones(2, w.shape[1])).sum())
w.detach().apply_(lambda x: x * 0.9)
w.data.apply_(lambda x: x * 0.9)
w.detach().map_(w.detach().clone(), lambda a, b: a * 0.5 + b * 0.4)
k = copy.copy(w); k.mul_(0.9)
k = copy.deepcopy(w); k.mul_(0.9); see(k.sum())
k = nn.Parameter(w); k.mul_(0.9)
see(torch.func.vmap(torch.norm, in_dims=1)(w).sum())
see(torch.func.vmap(torch.norm)(w[:]).sum())
see(torch.func.grad(lambda x: (x @ x.T).sum())(w)[0].sum())
see(torch.func.jvp(lambda x: x * x, (w,), (torch.ones_like(w),))[1].sum())
see(torch.func.vmap(lambda i: w[i].sum())(torch.tensor([0, 1])).sum())
see(torch.autograd.functional.jacobian(lambda x: x.sum(0), w).sum())
[q.mul_(0.9) for q in groups]
[setattr(q, "data", q.data * 0.9) for q in groups]
torch._foreach_mul_(groups, 0.9)
m.weight.data *= 0.9; [q.mul_(0.9) for q in groups]
[q.mul_(0.9) for q in groups]; m.weight.data *= 0.9
m.weight.data *= 0.9; torch._foreach_mul_(groups, 0.9); m.weight.mul_(0.5); [q.add_(0.01) for q in groups]
w[0, 0] = 1.5; torch._foreach_mul_(groups, 0.9); see(w.sum())
""".strip().splitlines()
"""Run at the end of each batch."""

IN_GRADIENT_HOOKS = r"""
w.grad.apply_(lambda x: x * 0.5)
w.grad.map_(w.detach(), lambda g, x: g + 0.1 * x)
g = w.grad; w.grad = None; w.grad = g * 0.5
g = w.grad; w.grad = g * 0.5; w.grad.add_(g, alpha=0.1); see(g.sum())
h = w.grad; g = w.grad; w.grad = w.grad * 0.5; w.grad.add_(h, alpha=0.1); see(g.sum() + h.norm())
g = w.grad; row = g[0]; w.grad = None; see(row.sum()); w.grad = torch.zeros_like(w); w.grad[0] = row
w.grad = None; w.grad = torch.full_like(w, 0.01)
w.grad = None; w.grad = torch.ones(w.shape)
g = w.grad; del w.grad; w.grad = g
g = w.grad; g *= 0.5; w.grad = g
s.model.blocks[1].up.weight.grad, w.grad = w.grad, s.model.blocks[1].up.weight.grad
a, b = w.grad, s.model.blocks[1].up.weight.grad; w.grad = b + a; s.model.blocks[1].up.weight.grad = a - b
w.grad *= 0.5
w.grad.data /= 2
w.grad = w.grad / 2
w.grad.mul_(0.5)
w.grad[0] = 0
w.grad[w.grad.abs() < 0.01] = 0
w.grad[0, 0] += 1
w.grad.view(-1)[2] = 0
w.grad.t()[0].zero_()
w.grad.add_(w, alpha=0.1)
w.grad.data.add_(w.data, alpha=0.1)
w.grad.sign_()
w.grad.copy_(w.grad.sign())
w.grad.clamp_(-0.01, 0.01)
w.grad -= w.grad.mean(dim=1, keepdim=True)
w.grad.sub_(w.grad.mean())
w.grad.div_(w.grad.norm() + 1e-6)
w.grad = torch.where(w.grad.isnan(), 0, w.grad)
w.grad = None
w.grad.zero_()
w.grad = torch.zeros_like(w)
w.grad = torch.ones(w.shape)
w.grad.detach_().mul_(0.5)
w.grad.detach().numpy()[0] = 0
np.clip(w.grad.numpy(), -0.01, 0.01, out=w.grad.numpy())
torch._foreach_mul_([p.grad for p in ps], 0.5)
torch._foreach_clamp_max_([p.grad for p in ps], 0.01)
torch.nn.utils.clip_grad_value_(ps, 0.01)
torch.nn.utils.clip_grad_norm_(ps, 0.01)
torch.nn.utils.clip_grad_norm_(w, 0.01)
torch.nn.utils.clip_grads_with_norm_(ps, 0.01, torch.nn.utils.get_total_norm([p.grad for p in ps]))
torch.mul(w.grad, 0.5, out=w.grad)
w.grad.fill_diagonal_(0)
w.grad.index_fill_(0, torch.tensor([1]), 0)
w.grad.copy_(w.grad.flip(0))
w.grad, m.bias.grad = w.grad * 0.5, m.bias.grad * 2
g = w.grad; g *= 0.5
g = w.grad.clone(); w.grad.zero_(); w.grad.add_(g, alpha=0.5)
see(torch.cat([p.grad.flatten() for p in ps]).norm())
see(sum(p.grad.pow(2).sum() for p in ps) ** 0.5)
see(torch.stack(torch._foreach_norm([p.grad for p in ps])).norm())
see(functional.cosine_similarity(w.grad.flatten(), w.flatten(), 0))
see((w.grad * w).sum() + torch.einsum("ij,ij->", w.grad, w))
see(np.abs(w.grad.cpu().numpy()).max())
see(all(p.grad is not None and p.grad.isfinite().all() for p in ps))
see(w.grad.shape[0] + w.grad.numel() + (w.grad.dtype == torch.float32))
see(w.grad.topk(2).values.sum() + w.grad.quantile(0.3))
see(torch.linalg.svdvals(w.grad)[0])
""".strip().splitlines()
"""Run before each step of the optimizer."""

IN_STEPS = r"""
[q.data.clamp_(-0.1, 0.1) for q in groups]
[q.mul_(0.9) for q in groups]
[setattr(q, "data", q.data * 0.9) for q in groups]
torch._foreach_mul_(groups, 0.9)
[nn.init.zeros_(q) for q in groups]
s.model.to(s.device)
s.model.double().float()
w.detach().apply_(lambda x: x * 0.9)
k = copy.copy(w); k.mul_(0.9)
s.model.head.weight.data.mul_(0.9)
""".strip().splitlines()
"""Run before the forward of each batch."""

IN_LATE_STEPS = r"""
w.data[0, 0] = 1.5
w.data.fill_(0.1)
k = w.data; k[0, 0] = 1.5
k = w.data; k *= 0.5
k = w.detach(); k += 1
torch.mul(w, 0.9, out=w)
torch.mul(w.data, 0.9, out=w.data)
torch._foreach_mul_([w, h], 0.9)
torch._foreach_copy_([w.data, m.bias.data], [w * 0.5, m.bias * 2])
torch.from_dlpack(w.data).mul_(0.9)
torch.from_numpy(w.data.numpy()).mul_(0.9)
w.data.numpy()[0] = 0.25
np.multiply(w.detach().numpy(), 0.5, out=w.detach().numpy())
k = nn.Parameter(w); k.mul_(0.9)
k = m.bias.detach().numpy(); k *= 0.5; see(m.bias.sum())
h.data[0, 0] = 1.5
h.data.mul_(0.5)
k = h.data; k *= 0.5
k = h.detach(); k[0] += 1
h.data = h.data * 0.5
h.data.view(-1)[0] = 0
h.data.t()[0] = 0
h[0].data.mul_(0.5)
h.view(-1).data[0] = 0.5
h.data.apply_(lambda x: x * 0.9)
h.data.index_fill_(0, torch.tensor([0]), 0.1)
h[0] = 0
h.view(-1)[0] = 0
h.mul_(0.5)
[r.mul_(0.5) for r in h.data]
nn.init.trunc_normal_(h, generator=torch.Generator().manual_seed(3))
torch.mul(h, 0.9, out=h)
torch.neg(h.data, out=h.data)
torch._foreach_mul_([h.data], 0.9)
torch._foreach_zero_(ps[:1])
torch.nn.utils.vector_to_parameters(torch.full((h.numel(),), 0.1), [h])
w.mul_(0.5); [q.clamp_(-0.1, 0.1) for q in groups]
h.mul_(0.5); [q.mul_(0.9) for q in groups]; h.add_(0.01); see(h.sum())
see(np.abs(h.detach().cpu().numpy()).max())
see(np.asarray(h.detach())[0, 0] + np.asarray(w.detach())[0, 0])
k = np.asarray(h.detach(), dtype=np.float64); k *= 0.5; see(k.sum())
h.detach().numpy()[0] = 0.25
torch.from_numpy(h.detach().numpy()).mul_(0.9)
torch.from_dlpack(h.detach()).mul_(0.9)
""".strip().splitlines()
"""Run in some batches that are not the first, where most steps are not looked at; ``h`` is a weight of the root's."""

IN_FORWARDS = r"""
w.data.clamp_(-0.1, 0.1)
w.clamp_(-0.1, 0.1)
w.data = torch.renorm(w.data, 2, 0, 0.4)
w.data = w.data * 0.9
w.data[0] = 0.3
w[0] = 0.3
w.copy_(w / w.norm())
w.data.copy_(w.data / w.data.norm())
m.weight.data *= 0.9
m.weight *= 0.9
w.detach().mul_(0.9)
w.detach().numpy()[0] = 0.25
torch.from_numpy(w.data.numpy()).mul_(0.9)
nn.utils.vector_to_parameters(w.flatten() * 0.9, [w])
nn.init.zeros_(w)
torch.mul(w, 0.9, out=w)
torch._foreach_mul_([w, m.bias], 0.9)
see(w.norm())
see(np.abs(w.detach().cpu().numpy()).max())
k = w.data; k *= 0.9
k = nn.Parameter(w.data); k.mul_(0.9)
m.bias.data.sub_(m.bias.data.mean())
m.load_state_dict({"weight": w * 0.9, "bias": m.bias})
s.model.head.weight.data.mul_(0.9)
s.model.blocks[1].up.weight.mul_(0.9)
s.model.blocks[1].up.weight[0] = 0.3
s.model.blocks[1].up.weight.data[0] = 0.3
see(s.model.blocks[1].up.weight.norm())
""".strip().splitlines()
"""Run in the forward of the layer, before its own."""

IN_STATES = r"""
o.state[w]["momentum_buffer"].mul_(0.5)
o.state[w]["momentum_buffer"].zero_()
o.state[w]["momentum_buffer"] = torch.zeros_like(w)
o.state[w]["momentum_buffer"] = torch.zeros(w.shape)
o.state[w]["momentum_buffer"] = torch.full_like(w, 0.01)
o.state[w]["momentum_buffer"] = torch.full(w.shape, 0.01)
o.state[w]["momentum_buffer"] = o.state[w]["momentum_buffer"] * 0.5
o.state[w]["momentum_buffer"] = None
o.state[w]["momentum_buffer"][0] = 0
o.state[w]["momentum_buffer"].view(-1)[2] = 1
o.state[w]["momentum_buffer"].copy_(w)
o.state[w]["momentum_buffer"].data[0, 1] = 0.5
o.state[w]["momentum_buffer"].data = w.clone()
o.state[w]["momentum_buffer"].detach().numpy()[0] = 0
del o.state[w]
o.state.pop(w, None)
o.state[w].clear()
o.state[w] = {}
o.state[w] = {"momentum_buffer": w.clone()}
o.state[w]["mine"] = 1; see(o.state[w]["mine"])
see(o.state[w]["momentum_buffer"].norm())
see(o.state[w]["momentum_buffer"][0].sum())
see(o.state[w]["momentum_buffer"].shape[0])
see(sum(v["momentum_buffer"].norm() for v in o.state.values()))
see(w in o.state)
see(torch.cat([o.state[q]["momentum_buffer"].flatten() for q in ps]).norm())
[v["momentum_buffer"].mul_(0.5) for v in o.state.values()]
[v["momentum_buffer"].clamp_(-0.01, 0.01) for v in o.state.values()]
[v.__setitem__("momentum_buffer", v["momentum_buffer"] * 0.5) for v in o.state.values()]
[o.state[q].update(momentum_buffer=torch.zeros_like(q)) for q in groups]
torch._foreach_mul_([v["momentum_buffer"] for v in o.state.values()], 0.5)
w.add_(o.state[w]["momentum_buffer"], alpha=0.1)
w.copy_(o.state[w]["momentum_buffer"])
w.data.sub_(o.state[w]["momentum_buffer"].sign(), alpha=0.01)
w[o.state[w]["momentum_buffer"].abs() < 0.01] = 0
o.state[w], o.state[s.model.blocks[1].up.weight] = o.state[s.model.blocks[1].up.weight], o.state[w]
o.load_state_dict(o.state_dict())
o.load_state_dict(copy.deepcopy(o.state_dict()))
k = o.state_dict(); [v["momentum_buffer"].mul_(0.5) for v in k["state"].values()]; o.load_state_dict(k)
k = o.state_dict()["state"]; k[0]["momentum_buffer"].zero_()
see(sum(v["momentum_buffer"].norm() for v in o.state_dict()["state"].values()))
o.param_groups[0]["lr"] *= 0.9
o.param_groups[0]["momentum"] = 0.5
o.param_groups[0].update(weight_decay=0.1)
o.param_groups[0]["maximize"] = not o.param_groups[0]["maximize"]
o.param_groups[0]["nesterov"] = True
o.param_groups[0]["foreach"] = False
[g.__setitem__("lr", 0.02) for g in o.param_groups]
o.zero_grad(set_to_none=False)
o.state[m.bias]["momentum_buffer"].zero_()
o.state[s.model.head.bias]["momentum_buffer"].mul_(0.5)
see(o.state[s.model.head.bias]["momentum_buffer"].sum())
k = copy.deepcopy(o.state[w]); o.state[w].update(k)
s.optimizers().state[w]["momentum_buffer"].mul_(0.5)
see(o.state[w]["momentum_buffer"].mean()); w.grad = None
o.state[w]["momentum_buffer"].add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(3)))
""".strip().splitlines()
"""Run at the end of some batches, or in some steps, when the optimizer has stepped."""

_ELSEWHERE = [line for line in IN_HOOKS if not line.startswith("s.k =")]
"""Those that `answers_to` knows in evaluations and in windows, each in one of both."""

LINES = {
    "hooks": IN_HOOKS[::2],
    "more_hooks": IN_HOOKS[1::2],
    "gradients": IN_GRADIENT_HOOKS,
    "states": IN_STATES,
    "states_in_steps": IN_STATES,
    "steps": IN_STEPS,
    "late": IN_LATE_STEPS,
    "late_validation": IN_LATE_STEPS,
    "validation": _ELSEWHERE[::2],
    "manual_backward": IN_GRADIENT_HOOKS,
    "manual_window": _ELSEWHERE[1::2],
    "forwards": IN_FORWARDS,
    "late_forwards": IN_FORWARDS,
    "manual_forwards": IN_FORWARDS,
    "recomputed_forwards": IN_FORWARDS,
    "validation_forwards": IN_FORWARDS,
}

_PART = Refused(r"requires_grad_\(\) of what was made from a sharded", "`weight[:].detach().requires_grad_()`")
_FREED = Refused(r"torch\.autograd\.grad\(\) with respect to sharded", "`weight[:].detach().requires_grad_()`")


_COPIED = Refused(r"FSDP frees its memory after the forward", "`weight[0] = 0.25` under `torch.no_grad()`")
_IN_A_UNIT = Refused(r"Sharded weights \(DTensors\) met plain tensors", "the hook `on_validation_batch_start()`")
_WRAPPED = Refused(r"inside of torch\.func|storage of TensorWrapper", "`full = weight[:]`, outside of the transform")
_IN_FORWARD = Refused("changed inside a forward, where FSDP1 shows views", "`weight.data[0] = 0.3`")
_ASSIGNS_VIEW = Refused(r"assigns a tensor to a parameter, as module\.weight \*= value", "`weight.data.mul_(value)`")
_RECOMPUTED = Refused(r"A forward whose activations are recomputed", "what `training_step` hands in")
_NOT_ADDED = Refused(r"neither used in a step nor zeroed", "`optimizer.zero_grad()`")


def answers_to(line: str, where: str) -> dict[str, Refused]:
    """Return the answers of engines that refuse a line somewhere."""
    answers = _answers(line, where)
    if where == "manual_window" and "torch.func.grad(" in line:
        answers |= {"zero3": _WRAPPED}
    if where == "validation" and ("torch.func.jvp" in line or "functional.jacobian" in line):
        answers.pop("zero3", None)  # which has the weight gathered then
    return answers


def _answers(line: str, where: str) -> dict[str, Refused]:
    if where.startswith("states") and ("o.state" in line or "s.optimizers().state" in line):
        return _answers_in_states(line)
    if where.endswith("forwards"):
        return _answers_in_forwards(line, where)
    if (
        where.startswith("late")
        and line.endswith((".numpy()[0] = 0.25", "(h.detach().numpy()).mul_(0.9)"))
        and "h." in line
    ):
        return {"fsdp1": _COPIED, "fsdp2": _COPIED}
    if where.startswith("late") and "dlpack(h" in line:
        return {"fsdp1": _COPIED, "fsdp2": _COPIED}
    if where == "validation" and ("state_dict()" in line or line.startswith("see(m(")):
        return {"fsdp2": _IN_A_UNIT}
    if where == "manual_window" and line == "s.model.zero_grad()":
        return {"zero2": _NOT_ADDED, "zero3": _NOT_ADDED}
    if ".double()." in line and "model" in line:
        return dict.fromkeys(("fsdp1", "fsdp2", "zero2", "zero3"), MOVED)
    if "torch.func." in line and "(w[:])" not in line:
        return dict.fromkeys(("fsdp1", "fsdp2", "zero3"), TRANSFORMED)
    if "torch.autograd.functional" in line:
        return {"fsdp1": _PART, "fsdp2": _FREED, "zero3": _PART}
    return {}


def _answers_in_forwards(line: str, where: str) -> dict[str, Refused]:
    if "numpy()" in line and not line.startswith("see"):
        return {"fsdp1": _COPIED, "fsdp2": _COPIED}
    if "blocks[1]" in line:
        return dict.fromkeys(("fsdp1", "fsdp2") if where == "recomputed_forwards" else (), _RECOMPUTED)
    if line.startswith("m.weight *="):
        return {"fsdp1": _ASSIGNS_VIEW}
    answers = {"fsdp2": _IN_A_UNIT} if line.startswith("m.load_state_dict") else {}
    if where == "validation_forwards" or ".data" in line or line.startswith(("see", "nn.utils")):
        return answers  # torch refuses others where a graph has the weight
    return answers | {"fsdp1": _IN_FORWARD}


def _answers_in_states(line: str) -> dict[str, Refused]:
    if line.startswith("see(sum(") and "state_dict" not in line:
        return dict.fromkeys(("zero2", "zero3"), FLAT_WEIGHTS)
    is_of_all = "o.state.values()" in line or "in groups" in line  # element by element, flat or not
    return {} if is_of_all else dict.fromkeys(("zero2", "zero3"), NO_STATES)


def run_line(module: Any, code: Any, layer: str = "blocks.0.up") -> None:
    """Run a compiled line of users' code with the names that this file has for it."""
    linear, optimizers = module.model.get_submodule(layer), module.optimizers()
    names = {
        "s": module,
        "m": linear,
        "w": linear.weight,
        "h": module.model.head.weight,
        "o": module.trainer.optimizers[0],
        "ps": list(module.parameters()),
        "groups": (optimizers[0] if isinstance(optimizers, list) else optimizers).param_groups[0]["params"],
        "see": lambda value: module.see("", value),
        "np": np,
        "torch": torch,
        "nn": nn,
        "functional": functional,
        "copy": copy,
    }
    with torch.no_grad():
        exec(code, names)


def _pattern(line: str, where: str) -> type[Pattern]:
    code = compile(line, "<line>", "exec")
    if where.endswith("forwards"):
        return _pattern_in_forwards(code, where)

    class InHooks(Pattern):
        def on_train_batch_end(self, *_: Any) -> None:
            if where.endswith("hooks") or self.global_step in (3, 5):
                run_line(self, code)

    class InGradientHooks(Pattern):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            run_line(self, code)

    class InSteps(Pattern):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            run_line(self, code)
            return self.loss(batch)

    class InLateSteps(Pattern):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step in (2, 3, 6):
                run_line(self, code)
            return self.loss(batch)

    class InLateValidation(Pattern):
        validates = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx in (2, 3):
                run_line(self, code)
            super().validation_step(batch, batch_idx)

    class InValidation(Pattern):
        validates = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                run_line(self, code)
            super().validation_step(batch, batch_idx)

    class ManualGradients(Manual):
        def after_backward(self, batch_idx: int) -> None:
            if batch_idx % 2:
                run_line(self, code)

    class ManualWindow(Manual):
        def after_backward(self, batch_idx: int) -> None:
            run_line(self, code)

    return {
        "hooks": InHooks,
        "more_hooks": InHooks,
        "gradients": InGradientHooks,
        "states": InHooks,
        "states_in_steps": InLateSteps,
        "steps": InSteps,
        "late": InLateSteps,
        "late_validation": InLateValidation,
        "validation": InValidation,
        "manual_backward": ManualGradients,
        "manual_window": ManualWindow,
    }[where]


def _pattern_in_forwards(code: Any, where: str) -> type[Pattern]:
    class LateForwards(Forwards):
        def in_forward(self) -> None:
            if self.trainer.training and self.global_step in (2, 3, 6):
                run_line(self, code)

    class AllForwards(Forwards):
        def in_forward(self) -> None:
            run_line(self, code)

    class ManualForwards(LateForwards):
        is_automatic = False

    class RecomputedForwards(AllForwards):
        recomputes = True

    class ValidationForwards(Forwards):
        validates = True

        def in_forward(self) -> None:
            if not self.trainer.training and self.global_step > 0:
                run_line(self, code)

    return {
        "forwards": AllForwards,
        "late_forwards": LateForwards,
        "manual_forwards": ManualForwards,
        "recomputed_forwards": RecomputedForwards,
        "validation_forwards": ValidationForwards,
    }[where]


class Forwards(ManualPattern):
    """Runs code of the user's in the forward of a layer, before the layer's own."""

    is_automatic = True
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = self.is_automatic
        in_forward, block = self.in_forward, self.model.blocks[0]

        class Own(nn.Linear):
            def forward(self, inputs: Any) -> Any:
                in_forward()
                return super().forward(inputs)

        block.up.__class__ = Own
        if self.recomputes:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def in_forward(self) -> None:
        """Run in the layer's forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if self.automatic_optimization else self.first_backward(batch).step()


class Manual(Pattern):
    """Steps after every second batch, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def after_backward(self, batch_idx: int) -> None:
        """Run between a backward and what follows it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        self.after_backward(batch_idx)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def problems_of_lines(where: str, engine: str) -> list[str]:
    """Train each line under an engine and under ddp on this rank; return those that are not right."""
    found = []
    for line in LINES[where]:
        name = f"{where}: {line}"
        if name not in PATTERNS:
            PATTERNS[name] = Entry(_pattern(line, where), "lines", answers_to(line, where), core=False)
        found += problems([name], engine)
    return found
