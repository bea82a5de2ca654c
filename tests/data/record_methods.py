"""Records results of PyTorch for single methods of tensors, for tests/torch/methods.rs.

Needs torch and numpy. Run in this folder: python record_methods.py. It writes torch/methods.safetensors:
    in/NAME       the inputs that cases share
    CASE/value    the result of a case, as f32, flat
    CASE/0, 1 …   the gradients of Σ wᵢ·valueᵢ with respect to the inputs that are floats, wᵢ = ((7 i) mod 11 − 5)/4
"""
import json, math, os, struct
import numpy as np, torch, torch.nn.functional as F

here = os.path.dirname(os.path.abspath(__file__))
inf, nan = math.inf, math.nan
rng = np.random.default_rng(7)


def normal(*shape):
    return np.round(rng.normal(0, 1.2, shape), 3).astype(np.float32)


special = [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 6.0, -6.0, 1e20, -1e20, 1e-20, 25.0, -25.0, 90.0, -90.0, 2.5, -2.5]
inputs = {
    "s": np.array(special + list(normal(18)), np.float32),
    "r": np.array([1.0, 2.0, inf, 0.0, 1.0, 0.0, 0.0, 3.0, 2.0, nan, -0.5, -inf, 4.0, 1e20, 1.5, 1e-20, 7.0, -7.0, 0.3, 0.7, -1.0, 1.0] + list(normal(18)), np.float32),
    "v": normal(2, 3, 4),
    "w": normal(2, 3, 4),
    "u": np.round(rng.uniform(0.05, 0.95, (2, 3, 4)), 3).astype(np.float32),
    "a": normal(5),
    "b": normal(5),
    "m": normal(4, 5),
    "zero": np.zeros((2, 3), np.float32),
    "wide": normal(2, 4, 3),
    "seq": normal(1, 2, 7),
    "img": normal(1, 4, 5, 6),
    "vol": normal(1, 1, 3, 4, 2),
    "grid": np.round(rng.uniform(-1.6, 1.6, (1, 3, 4, 2)), 3).astype(np.float32),
    "theta": normal(1, 2, 3),
    "i": np.array([7, -7, 7, -7, 0, 5, -5, 12, 1, -1, 3, -3], np.int32),
    "j": np.array([2, 2, -2, -2, 3, 3, 4, -5, 1, 7, -1, 2], np.int32),
    "t": np.array(list(rng.integers(0, 2, 24)), np.float32).reshape(2, 3, 4) * 2 - 1,
    "sign": np.array([[1, -1, 1], [-1, -1, 1]], np.float32),
    "classes": np.array([0.5, 2.0, 1.0, 0.25], np.float32),
    "labels": np.array([[0, 3, 1], [2, 2, 0]], np.int32),
    "ignored": np.array([[0, -100, 1], [2, -100, 0]], np.int32),
    "places": np.array([[0, 2, 1, 1], [2, 2, 0, -100]], np.int32),
    "three": np.array([1.5, 0.5, 1.0], np.float32),
    "guesses": np.array([[0, 1, 1], [2, 0, 0]], np.int32),
    "scores": np.array([0.3, 0.2, 0.3, 0.1, -1.0, 0.9, 0.2, 0.5, 0.25, -1.0, 0.7, 0.3], np.float32),
    "photo": np.cos(np.arange(2 * 2 * 13 * 12) * 0.37).astype(np.float32).reshape(2, 2, 13, 12) * 0.5 + 0.5,
    "print": np.sin(np.arange(2 * 2 * 13 * 12) * 0.35).astype(np.float32).reshape(2, 2, 13, 12) * 0.4 + 0.5,
    "k": np.array([0, 1, 2, 3, 4, 5, 6, 2, 3, 1, 0, 2], np.int32),
}

cases = {}
for name, f in {
    "atan": torch.atan, "asin": torch.asin, "acos": torch.acos, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh, "log2": torch.log2, "log10": torch.log10, "trunc": torch.trunc,
    "fract": torch.frac, "erfinv": torch.erfinv, "logit": torch.logit, "is_nan": torch.isnan, "is_infinite": torch.isinf,
    "is_finite": torch.isfinite, "nan_to_num": lambda x: torch.nan_to_num(x, 0.5, 2.0, -3.0), "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 1.3), "selu": F.selu, "celu": lambda x: F.celu(x, 0.7), "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "hardtanh": F.hardtanh, "mish": F.mish, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "log_sigmoid": F.logsigmoid,
    "softsign": F.softsign, "tanhshrink": F.tanhshrink, "hardshrink": lambda x: F.hardshrink(x, 0.5), "softshrink": lambda x: F.softshrink(x, 0.5),
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
}.items():
    cases[name] = (["s"], f)
for name, f in {
    "atan2": torch.atan2, "fmod": torch.fmod, "remainder": torch.remainder, "div_floor": lambda x, y: torch.floor_divide(x.detach(), y.detach()), "hypot": torch.hypot,
    "logaddexp": torch.logaddexp, "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp_far": lambda x, y: torch.lerp(x, y, 0.75),
    "prelu": lambda x, y: F.prelu(x[None], y), "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
}.items():
    cases[name] = (["s", "r"], f)
cases["clamp_between"] = (["v", "w", "u"], lambda x, y, z: torch.clamp(x, y, z))
for name, f in {
    "i_fmod": torch.fmod, "i_remainder": torch.remainder, "i_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "i_div_floor": torch.floor_divide,
    "i_and": torch.bitwise_and, "i_or": torch.bitwise_or, "i_xor": torch.bitwise_xor,
}.items():
    cases[name] = (["i", "j"], f)
cases["i_not"] = (["i"], torch.bitwise_not)
cases["i_pow"] = (["i", "k"], torch.pow)
cases["i_shift_left"] = (["i", "k"], torch.bitwise_left_shift)
cases["i_shift_right"] = (["i", "k"], torch.bitwise_right_shift)

for name, f in {
    "var": lambda x: x.var(), "var_0": lambda x: x.var((0, 2), correction=0), "std": lambda x: x.std(1), "std_keep": lambda x: x.std((1, 2), correction=0, keepdim=True),
    "norm_0": lambda x: torch.linalg.vector_norm(x, 0, 1), "norm_1": lambda x: torch.linalg.vector_norm(x, 1, 1), "norm_2": lambda x: torch.linalg.vector_norm(x, 2),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3, (0, 1)), "norm_half": lambda x: torch.linalg.vector_norm(x, 0.5, 2),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, inf, 2), "norm_minus_inf": lambda x: torch.linalg.vector_norm(x, -inf, 2),
    "flip": lambda x: x.flip(0, 2), "roll": lambda x: x.roll(1, 2), "roll_back": lambda x: x.roll(-5, 1), "tile": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1), "chunk": lambda x: x.chunk(3, 2)[1],
    "split_lengths": lambda x: x.split([1, 3], 2)[1], "unbind": lambda x: x.unbind(1)[2], "narrow": lambda x: x.narrow(2, 1, 2),
    "movedim": lambda x: x.movedim(0, 2), "movedim_back": lambda x: x.movedim(2, 0), "tril": lambda x: x.tril(), "tril_1": lambda x: x.tril(1), "triu_1": lambda x: x.triu(1),
    "triu_minus_1": lambda x: x.triu(-1), "diagonal": lambda x: x.diagonal(0, 1, 2), "diagonal_2": lambda x: x.diagonal(2, 1, 2), "diagonal_minus_1": lambda x: x.diagonal(-1, 1, 2),
    "diagonal_far": lambda x: x.diagonal(9, 1, 2), "diag_embed": lambda x: torch.diag_embed(x), "diag_embed_2": lambda x: torch.diag_embed(x, 2),
    "diag_embed_minus_1": lambda x: torch.diag_embed(x, -1), "softmin": lambda x: F.softmin(x, 1), "softmax_at": lambda x: F.softmax(x / 0.3, 2),
    "glu": lambda x: F.glu(x, 2), "swiglu": lambda x: F.silu(x[..., :2]) * x[..., 2:], "geglu": lambda x: F.gelu(x[..., :2]) * x[..., 2:],
}.items():
    cases[name] = (["v"], f)
cases["zero_std"] = (["zero"], lambda x: x.std(1))
cases["zero_norm"] = (["zero"], lambda x: torch.linalg.vector_norm(x, 2, 1))
cases["zero_norm_3"] = (["zero"], lambda x: torch.linalg.vector_norm(x, 3, 1))
cases["outer"] = (["a", "b"], torch.outer)
cases["dot"] = (["a", "b"], torch.dot)
cases["diagonal_sum"] = (["m"], torch.trace)
cases["cosine_similarity"] = (["v", "w"], lambda x, y: F.cosine_similarity(x, y, 1))
cases["pairwise_distance"] = (["v", "w"], lambda x, y: F.pairwise_distance(x, y))
cases["pairwise_distance_1"] = (["v", "w"], lambda x, y: F.pairwise_distance(x, y, 1.0))

for mode in ["reflect", "replicate", "circular"]:
    cases[f"pad_{mode}"] = (["img"], lambda x, mode=mode: F.pad(x, (2, 1, 3, 4), mode))
    cases[f"pad_{mode}_seq"] = (["seq"], lambda x, mode=mode: F.pad(x, (3, 2), mode))
cases["pad_crop"] = (["img"], lambda x: F.pad(x, (-1, 2, 1, -2), value=0.5))
cases["pad_crop_replicate"] = (["img"], lambda x: F.pad(F.pad(x, (-1, 0, 0, -2)), (0, 2, 1, 0), "replicate"))
cases["pixel_shuffle"] = (["img"], lambda x: F.pixel_shuffle(x, 2))
cases["pixel_unshuffle"] = (["img"], lambda x: F.pixel_unshuffle(x[:, :, :4], 2))
cases["unfold"] = (["img"], lambda x: F.unfold(x, (2, 3)))
cases["unfold_all"] = (["img"], lambda x: F.unfold(x, (2, 3), (2, 1), (1, 2), (1, 2)))
cases["adaptive_max_pool"] = (["img"], lambda x: F.adaptive_max_pool2d(x, (2, 4)))
cases["adaptive_max_pool_1"] = (["img"], lambda x: F.adaptive_max_pool2d(x, 1))
cases["lp_pool"] = (["img"], lambda x: F.lp_pool2d(x, 2.0, (2, 3), (1, 2)))

sizes = {"img": [(10, 12), (7, 9), (3, 4), (1, 1), (5, 11)], "seq": [(14,), (4,), (1,)], "vol": [(5, 2, 4)]}
for source, kinds in {"seq": "linear", "img": "bilinear", "vol": "trilinear"}.items():
    for n, size in enumerate(sizes[source]):
        cases[f"nearest_{source}_{n}"] = ([source], lambda x, size=size: F.interpolate(x, size))
        cases[f"nearest_exact_{source}_{n}"] = ([source], lambda x, size=size: F.interpolate(x, size, mode="nearest-exact"))
        for corners in [0, 1]:
            cases[f"linear_{corners}_{source}_{n}"] = ([source], lambda x, size=size, kinds=kinds, corners=corners: F.interpolate(x, size, mode=kinds, align_corners=bool(corners)))
            if source == "img":
                cases[f"cubic_{corners}_{source}_{n}"] = ([source], lambda x, size=size, corners=corners: F.interpolate(x, size, mode="bicubic", align_corners=bool(corners)))
for sampling in ["nearest", "bilinear", "bicubic"]:
    for beyond in ["zeros", "border", "reflection"]:
        for corners in [0, 1]:
            cases[f"grid_{sampling}_{beyond}_{corners}"] = (["img", "grid"], lambda x, y, s=sampling, b=beyond, c=corners: F.grid_sample(x, y, s, b, bool(c)))
for corners in [0, 1]:
    cases[f"affine_grid_{corners}"] = (["theta"], lambda x, c=corners: F.affine_grid(x, (1, 1, 3, 4), bool(c)))

cases["linspace"] = ([], lambda: torch.linspace(-1.3, 2.9, 8))
cases["range"] = ([], lambda: torch.arange(10, 3, -2))
cases["range_f32"] = ([], lambda: torch.arange(0.5, 2.0, 0.3))
cases["eye"] = ([], lambda: torch.eye(3, 5))
cases["meshgrid"] = (["a", "b"], lambda x, y: torch.stack(torch.meshgrid(x, y, indexing="ij")))

R = ["none", "mean", "sum"]
rows = lambda x: x.movedim(-1, 1)
for r in R:
    for s in [0.0, 0.2]:
        cases[f"cross_entropy_{r}_{s}"] = (["v", "labels"], lambda x, y, r=r, s=s: F.cross_entropy(rows(x), y.long(), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_all_{r}_{s}"] = (["v", "ignored", "classes"], lambda x, y, w, r=r, s=s: F.cross_entropy(rows(x), y.long(), w.detach(), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_ignored_{r}_{s}"] = (["v", "ignored"], lambda x, y, r=r, s=s: F.cross_entropy(rows(x), y.long(), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_weights_{r}_{s}"] = (["v", "labels", "classes"], lambda x, y, w, r=r, s=s: F.cross_entropy(rows(x), y.long(), w.detach(), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_axis_{r}_{s}"] = (["v", "places", "three"], lambda x, y, w, r=r, s=s: F.cross_entropy(x, y.long(), w.detach(), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_soft_{r}_{s}"] = (["v", "u"], lambda x, y, r=r, s=s: F.cross_entropy(rows(x), rows(y), reduction=r, label_smoothing=s))
        cases[f"cross_entropy_soft_weights_{r}_{s}"] = (["v", "u", "classes"], lambda x, y, w, r=r, s=s: F.cross_entropy(rows(x), rows(y), w.detach(), reduction=r, label_smoothing=s))
    cases[f"nll_{r}"] = (["v", "ignored", "classes"], lambda x, y, w, r=r: F.nll_loss(rows(x), y.long(), w.detach(), reduction=r))
    cases[f"mse_{r}"] = (["v", "w"], lambda x, y, r=r: F.mse_loss(x, y, reduction=r))
    cases[f"l1_{r}"] = (["v", "w"], lambda x, y, r=r: F.l1_loss(x, y, reduction=r))
    cases[f"huber_{r}"] = (["v", "w"], lambda x, y, r=r: F.huber_loss(x, y, reduction=r, delta=0.8))
    cases[f"smooth_l1_{r}"] = (["v", "w"], lambda x, y, r=r: F.smooth_l1_loss(x, y, reduction=r, beta=0.8))
    cases[f"bce_{r}"] = (["u"], lambda x, r=r: F.binary_cross_entropy(x, 1 - x.detach(), reduction=r))
    cases[f"bce_logits_{r}"] = (["v", "u"], lambda x, y, r=r: F.binary_cross_entropy_with_logits(x, y, reduction=r))
    cases[f"bce_weighted_{r}"] = (["v", "u", "classes"], lambda x, y, w, r=r: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach(), reduction=r))
    cases[f"kl_{r}"] = (["v", "u"], lambda x, y, r=r: F.kl_div(x, y, reduction=r))
    cases[f"kl_logs_{r}"] = (["v", "w"], lambda x, y, r=r: F.kl_div(x, y, reduction=r, log_target=True))
    cases[f"poisson_{r}"] = (["v", "u"], lambda x, y, r=r: F.poisson_nll_loss(x, y, reduction=r))
    cases[f"gaussian_{r}"] = (["v", "w", "u"], lambda x, y, z, r=r: F.gaussian_nll_loss(x, y, z, full=True, reduction=r))
    cases[f"hinge_embedding_{r}"] = (["v", "t"], lambda x, y, r=r: F.hinge_embedding_loss(x, y.detach(), 0.7, reduction=r))
    cases[f"soft_margin_{r}"] = (["v", "t"], lambda x, y, r=r: F.soft_margin_loss(x, y.detach(), reduction=r))
    cases[f"margin_ranking_{r}"] = (["v", "w", "t"], lambda x, y, z, r=r: F.margin_ranking_loss(x, y, z.detach(), 0.3, reduction=r))
    cases[f"triplet_{r}"] = (["v", "w", "u"], lambda x, y, z, r=r: F.triplet_margin_loss(x, y, z, 0.5, reduction=r))
    cases[f"cosine_embedding_{r}"] = (["v", "w", "sign"], lambda x, y, z, r=r: F.cosine_embedding_loss(x.reshape(6, 4), y.reshape(6, 4), z.detach().reshape(6), 0.1, reduction=r))
cases["kl_batch"] = (["v", "u"], lambda x, y: F.kl_div(x, y, reduction="batchmean"))
cases["kl_zero"] = (["sign", "zero"], lambda x, y: F.kl_div(x, y.detach()))
cases["smooth_l1_0"] = (["v", "w"], lambda x, y: F.smooth_l1_loss(x, y, beta=0.0))


def focal(x, t, alpha, gamma):
    # torchvision.ops.sigmoid_focal_loss
    p, ce = torch.sigmoid(x), F.binary_cross_entropy_with_logits(x, t, reduction="none")
    loss = ce * (1 - (p * t + (1 - p) * (1 - t))) ** gamma
    return ((alpha * t + (1 - alpha) * (1 - t)) * loss if alpha >= 0 else loss).mean()


cases["focal"] = (["v", "u"], lambda x, t: focal(x, t, 0.25, 2.0))
cases["focal_plain"] = (["v", "u"], lambda x, t: focal(x, t, -1.0, 1.5))
cases["dice"] = (["u", "t"], lambda p, t: (1 - (2 * (p * (t + 1) / 2).sum((1, 2)) + 1) / (p.sum((1, 2)) + ((t + 1) / 2).sum((1, 2)) + 1)).mean())
cases["hinge"] = (["v", "t"], lambda x, t: (1 - t * x).clamp(min=0).mean())
cases["info_nce"] = (["m"], lambda x: F.cross_entropy(F.normalize(x) @ F.normalize(x.exp().detach()).T / 0.2, torch.arange(4)))

cases["lgamma"] = (["s"], torch.lgamma)
for name, f in {
    "digamma": torch.digamma, "polygamma_1": lambda x: torch.polygamma(1, x), "polygamma_2": lambda x: torch.polygamma(2, x),
    "polygamma_4": lambda x: torch.polygamma(4, x),
}.items():
    cases[name] = (["v"], f)
cases["kron"] = (["v", "m"], torch.kron)
cases["tensordot"] = (["v", "w"], lambda x, y: torch.tensordot(x, y, dims=([2, 0], [2, 0])))
cases["tensordot_0"] = (["a", "m"], lambda x, y: torch.tensordot(x, y, dims=0))
cases["einsum_further"] = (["v", "w"], lambda x, y: torch.einsum("...i,...i->...", x, y))
cases["einsum_broadcast"] = (["v", "w"], lambda x, y: torch.einsum("...ij,...kj", x, y[:1]))
cases["einsum_within"] = (["v", "w"], lambda x, y: torch.einsum("i...k,k...j->...ij", x, y.permute(2, 1, 0)))
cases["einsum_summed"] = (["v"], lambda x: torch.einsum("...j->j", x))
cases["einsum_diagonal"] = (["m"], lambda x: torch.einsum("ii->i", x[:, :4]))
cases["einsum_trace"] = (["m", "a"], lambda x, y: torch.einsum("ii,j->j", x[:, :4], y))
cases["einsum_batch_diagonal"] = (["v"], lambda x: torch.einsum("...ii->...i", x[:, :, :3]))


def shares(x, y, k, of, by):
    x, y = F.one_hot(x.flatten().long(), k).float(), F.one_hot(y.flatten().long(), k).float()
    right, all = (x * y).sum(0), of * x.sum(0) + by * y.sum(0)
    return torch.where(all > 0, right / all.clamp(min=0.5), torch.zeros(k))


for name, (of, by) in {"class_precision": (1, 0), "class_recall": (0, 1), "class_f1": (0.5, 0.5)}.items():
    cases[name] = (["labels", "guesses"], lambda y, x, of=of, by=by: shares(x, y, 5, of, by))


def auroc(x, y):
    pairs = torch.sign(x[y != 0][:, None] - x[y == 0][None])
    return ((pairs + 1) / 2).mean()


def ssim(x, y, peak):
    along = torch.arange(-5.0, 6.0)
    bell = torch.exp(-along**2 / (2 * 1.5**2))
    window = torch.outer(bell, bell) / bell.sum() ** 2
    smooth = lambda t: F.conv2d(t.reshape(-1, 1, *t.shape[2:]), window[None, None])
    a, b = smooth(x), smooth(y)
    va, vb, ab = smooth(x * x) - a * a, smooth(y * y) - b * b, smooth(x * y) - a * b
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    return ((2 * a * b + c1) * (2 * ab + c2) / ((a * a + b * b + c1) * (va + vb + c2))).mean()


cases["auroc"] = (["scores", "i"], lambda x, y: auroc(x.detach(), y > 0))
cases["perplexity"] = (["v", "labels"], lambda x, y: F.cross_entropy(x.reshape(6, 4), y.reshape(6).long()).exp())
cases["psnr"] = (["u", "v"], lambda x, y: 10 * torch.log10(4 / F.mse_loss(x, y)))
cases["ssim"] = (["photo", "print"], lambda x, y: ssim(x, y, 1.0))

tensors = {f"in/{name}": value for name, value in inputs.items()}
for name, (of, f) in cases.items():
    xs = [torch.tensor(inputs[n]) for n in of]
    floats = [x.requires_grad_() for x in xs if x.is_floating_point()]
    y = f(*xs).flatten()
    tensors[f"{name}/value"] = y.detach().to(torch.float32).numpy()
    if y.requires_grad:
        i = torch.arange(y.numel())
        weights = ((7 * i) % 11 - 5).to(torch.float32) / 4
        slopes = torch.autograd.grad((y * weights).sum(), floats, allow_unused=True)
        for n, slope in enumerate(slopes):
            if slope is not None:
                tensors[f"{name}/{n}"] = slope.flatten().numpy()


def write(path, tensors):
    names = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for t in tensors.values():
            f.write(np.ascontiguousarray(t).tobytes())


write(os.path.join(here, "torch", "methods.safetensors"), tensors)
