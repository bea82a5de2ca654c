"""Records results of PyTorch for layers and operations of layers, for tests/torch/layers.rs.

Needs torch, transformers and numpy. Run in this folder: python record_layers.py. It writes torch/layers_and_options.safetensors:
    NAME/x0, x1, …   the arguments
    NAME/p.PARAM     parameters, as state_dict() names them
    NAME/y           the result
    NAME/dx0, …      gradients of Σ wᵢ·yᵢ with wᵢ = ((37·i) mod 11 − 5)/5, for each float argument
    NAME/dp.PARAM    and for each parameter
"""
import math, os
import torch, torch.nn as nn, torch.nn.functional as F
from record import save

KEPT = {}


def weights(n):
    return ((torch.arange(n) * 37) % 11 - 5) / 5.0


def flat(parts):
    for part in parts:
        if isinstance(part, tuple):
            yield from flat(part)
        else:
            yield part


def case(name, f, *xs, params=None, grad=True, call=None):
    module = f if isinstance(f, nn.Module) else None
    named = dict(module.named_parameters()) if module else dict(params or {})
    with torch.no_grad():
        for p in named.values():
            p.add_(0.2 * torch.randn_like(p))
    for p in named.values():
        p.requires_grad_(True)
    for i, x in enumerate(xs):
        KEPT[f"{name}/x{i}"] = x.int() if x.dtype in (torch.int64, torch.bool) else x.clone()
    for key, p in named.items():
        KEPT[f"{name}/p.{key}"] = p.detach().clone()
    xs = [x.clone().requires_grad_(True) if x.is_floating_point() and grad else x for x in xs]
    y = f(*xs, **({} if module else named)) if call is None else call(f, *xs)
    if isinstance(y, tuple):
        y = torch.cat([part.reshape(-1) for part in flat(y)])
    KEPT[f"{name}/y"] = y.detach().float()
    if grad:
        (y.reshape(-1) * weights(y.numel())).sum().backward()
        for i, x in enumerate(xs):
            if x.is_floating_point():
                KEPT[f"{name}/dx{i}"] = torch.zeros_like(x) if x.grad is None else x.grad
        for key, p in named.items():
            KEPT[f"{name}/dp.{key}"] = p.grad
    print(f"{name:36} {tuple(y.shape)}")


def rand(*shape):
    return torch.randn(shape)


def convolutions():
    case("conv2d_rows", nn.Conv2d(2, 3, (1, 5), stride=(2, 1), padding=(0, 2)), rand(2, 2, 5, 6))
    case("conv2d_rows_grouped", nn.Conv2d(4, 2, (3, 2), dilation=(1, 2), groups=2), rand(1, 4, 4, 5))
    case("conv2d_same", nn.Conv2d(2, 2, (4, 3), padding="same", dilation=(1, 2)), rand(1, 2, 5, 6))
    case("conv2d_same_even", nn.Conv2d(1, 2, 2, padding="same", bias=False), rand(1, 1, 3, 4))
    # Padding 1, 2 rows and 0, 3 columns; stride 2.
    conv = lambda x, w: F.conv2d(F.pad(x, (0, 3, 1, 2)), w, stride=2)
    case("conv2d_sides", conv, rand(1, 2, 5, 5), params={"w": rand(2, 2, 3, 3)})
    # "SAME" with a stride of 2: 6 columns of kernel 3 need one zero, after the last.
    conv = lambda x, w: F.conv2d(F.pad(x, (0, 1, 1, 1)), w, stride=2)
    case("conv2d_same_strided", conv, rand(1, 2, 5, 6), params={"w": rand(2, 2, 3, 3)})
    conv = lambda x, w: F.conv2d(F.pad(x, (1, 0, 1, 1)), w, stride=2)
    case("conv2d_same_lower", conv, rand(1, 2, 5, 6), params={"w": rand(2, 2, 3, 3)})
    case("conv1d", nn.Conv1d(3, 4, 3, stride=2, padding=1), rand(2, 3, 8))
    case("conv1d_grouped", nn.Conv1d(4, 4, 3, dilation=2, groups=4, bias=False), rand(1, 4, 9))
    causal = lambda x, w: F.conv1d(F.pad(x, (6, 0)), w, dilation=3)
    case("conv1d_causal", causal, rand(2, 2, 7), params={"w": rand(3, 2, 3)})
    case("conv3d", nn.Conv3d(2, 2, (2, 3, 2), stride=(2, 1, 1), padding=(1, 1, 0)), rand(2, 2, 4, 3, 3))
    case("conv3d_grouped", nn.Conv3d(2, 4, (2, 1, 2), dilation=(2, 1, 1), groups=2, bias=False), rand(1, 2, 4, 2, 3))
    case("transposed2d", nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1), rand(1, 3, 3, 2))
    case("transposed2d_more", nn.ConvTranspose2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=2, bias=False), rand(2, 2, 2, 3))
    case("transposed2d_dilated", nn.ConvTranspose2d(2, 1, 3, stride=2, padding=2, output_padding=2, dilation=3), rand(1, 2, 3, 3))
    case("transposed1d", nn.ConvTranspose1d(2, 3, 5, stride=3, padding=1, output_padding=2), rand(2, 2, 4))
    case("transposed1d_grouped", nn.ConvTranspose1d(4, 4, 2, stride=2, groups=4, bias=False), rand(1, 4, 3))


def pools():
    x = rand(1, 2, 7, 6)
    case("max_ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), x)
    case("max_ceil_padded", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x)
    # The last window would begin in the padding after the image.
    case("max_ceil_beyond", lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), rand(1, 1, 5, 4))
    case("max_ceil_large", lambda x: F.max_pool2d(x, 4, 3, ceil_mode=True), rand(1, 1, 3, 2))
    case("max_dilated", lambda x: F.max_pool2d(x, (2, 3), (1, 2), (1, 0), dilation=(3, 2)), x)
    case("max_dilated_ceil", lambda x: F.max_pool2d(x, 2, 2, 1, dilation=2, ceil_mode=True), x)
    case("max_sides", lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 2), value=-math.inf), 3, 2), x)
    case("max_positions", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)[1], x, grad=False)
    case("max_positions_dilated", lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2, return_indices=True)[1], x, grad=False)
    y, at = F.max_pool2d(x, 2, return_indices=True)
    case("unpool", lambda y, at: F.max_unpool2d(y, at.long(), 2, output_size=(7, 6)), y, at)
    case("max1d", lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True), rand(2, 2, 6))
    case("max1d_dilated", lambda x: F.max_pool1d(x, 3, 1, 1, dilation=2), rand(2, 2, 6))
    case("max1d_positions", lambda x: F.max_pool1d(x, 3, 2, return_indices=True)[1], rand(2, 2, 7), grad=False)
    for pad in (0, 1):
        for counted in (True, False):
            f = lambda x: F.avg_pool2d(x, 3, 2, pad, ceil_mode=True, count_include_pad=counted)
            case(f"avg_ceil_{pad}_{int(counted)}", f, x)
    case("avg_uncounted", lambda x: F.avg_pool2d(x, (3, 2), 1, 1, count_include_pad=False), x)
    case("avg_ceil_large", lambda x: F.avg_pool2d(x, 4, 3, 1, ceil_mode=True), rand(1, 1, 5, 4))
    case("avg_sides", lambda x: F.avg_pool2d(F.pad(x, (0, 1, 2, 1)), 3, 2), x)
    case("avg1d", lambda x: F.avg_pool1d(x, 4, 3, 2, ceil_mode=True), rand(2, 2, 8))
    case("avg1d_uncounted", lambda x: F.avg_pool1d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False), rand(2, 2, 8))
    w = torch.full((2, 1, 2, 2), 0.25)
    case("avg_dilated", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, stride=2, dilation=2, groups=2), x)
    count = lambda x: F.conv2d(F.pad(torch.ones_like(x), (1, 1, 1, 1)), w, stride=2, dilation=2, groups=2)
    case("avg_dilated_uncounted", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), w, stride=2, dilation=2, groups=2) / count(x), x)
    case("adaptive_max", lambda x: F.adaptive_max_pool2d(x, (3, 4)), x)
    case("adaptive_max1d", lambda x: F.adaptive_max_pool1d(x, 3), rand(2, 2, 7))
    case("adaptive_avg1d", lambda x: F.adaptive_avg_pool1d(x, 3), rand(2, 2, 7))
    case("global_max", lambda x: x.amax((2, 3)), x)


def norms():
    x = rand(2, 4, 3, 2)
    case("instance", nn.InstanceNorm2d(4), x)
    case("instance_affine", nn.InstanceNorm1d(3, affine=True, eps=1e-3), rand(2, 3, 5))
    case("local_response", nn.LocalResponseNorm(3, 0.5, 0.75, 2.0), x)
    case("local_response_even", nn.LocalResponseNorm(2, 0.5), rand(2, 3, 4))
    case("batch_plain", nn.BatchNorm2d(4, affine=False), x)
    case("batch_untracked", nn.BatchNorm1d(4, track_running_stats=False).eval(), rand(5, 4))
    case("layer_axes", nn.LayerNorm((3, 2)), x)
    case("layer_plain", nn.LayerNorm(5, elementwise_affine=False), rand(3, 5))
    case("l2", lambda x: F.normalize(x, dim=1), rand(4, 3))
    case("l2_of_zero", lambda x: F.normalize(x, dim=1), torch.zeros(1, 3))
    case("mean_variance", lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True), x)


def sdpa(q, k, v, **more):
    return F.scaled_dot_product_attention(q, k, v, **more)


def seen(queries, keys, past, causal, window):
    i, j = torch.arange(queries)[:, None] + past, torch.arange(keys)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if window:
        mask &= (i - j).abs() < window
    return mask


def attention():
    q, k, v = rand(2, 4, 5, 4), rand(2, 2, 5, 4), rand(2, 2, 5, 3)
    case("attention_grouped", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), q, k, v)
    one = lambda q, k, v: sdpa(q, k, v, attn_mask=seen(1, 5, 3, True, None), enable_gqa=True)
    case("attention_grouped_one", one, q[:, :, :1].contiguous(), k, v)
    case("attention_multi_query", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k[:, :1].contiguous(), v[:, :1].contiguous())
    bias = rand(4, 5, 5)
    case("attention_grouped_biased", lambda q, k, v, b: sdpa(q, k, v, attn_mask=b, enable_gqa=True), q, k, v, bias)
    k, v = rand(1, 2, 8, 4), rand(1, 2, 8, 4)
    q = rand(1, 2, 5, 4)
    case("attention_window", lambda q, k, v: sdpa(q, k, v, attn_mask=seen(5, 8, 3, True, 3)), q, k, v)
    case("attention_both_ways", lambda q, k, v: sdpa(q, k, v, attn_mask=seen(5, 8, 1, False, 2)), q, k, v)
    case("attention_past", lambda q, k, v, past: sdpa(q, k, v, attn_mask=seen(5, 8, past.item(), True, None)), q, k, v, torch.tensor(2))

    def capped(q, k, v):
        s = 3.0 * torch.tanh(q @ k.mT * 0.7 / 3.0)
        return s.softmax(-1) @ v
    case("attention_capped", capped, q, k, v)
    lengths = torch.tensor([3, 5])
    q, k, v = rand(2, 2, 4, 2), rand(2, 2, 5, 2), rand(2, 2, 5, 2)
    within = lambda q, k, v, n: sdpa(q, k, v, attn_mask=(torch.arange(5) < n[:, None])[:, None, None])
    case("attention_lengths", within, q, k, v, lengths)

    mha = nn.MultiheadAttention(6, 2, batch_first=True)
    class Cross(nn.Module):
        def __init__(self, it):
            super().__init__()
            for name, p in it.named_parameters(recurse=False):
                self.register_parameter(name, p)
            self.out_proj = it.out_proj
            self.__dict__["it"] = it
        def forward(self, q, k, v):
            return self.it(q, k, v, need_weights=False)[0]
    case("cross", Cross(mha), rand(2, 3, 6), rand(2, 4, 6), rand(2, 4, 6))
    case("cross_widths", Cross(nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)), rand(2, 3, 4), rand(2, 4, 3), rand(2, 4, 5))
    case("cross_unbiased", Cross(nn.MultiheadAttention(4, 2, bias=False, batch_first=True)), rand(1, 3, 4), rand(1, 2, 4), rand(1, 2, 4))
    case("encoder", nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), rand(2, 3, 4))
    case("encoder_gelu", nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=True), rand(2, 3, 4))
    decoder = nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True)
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            for name, child in decoder.named_children():
                if "dropout" not in name:
                    self.add_module(name, child)
        def forward(self, x, memory):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)
    case("decoder", Decoder(), rand(2, 3, 4), rand(2, 4, 4))

    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, attention_bias=False)
    config._attn_implementation = "sdpa"
    llama, turn = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)
    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            for name, child in llama.named_children():
                self.add_module(name, child)
        def forward(self, x):
            n = x.shape[1]
            turns = turn(x, torch.arange(n)[None])
            mask = torch.zeros(n, n).masked_fill(~seen(n, n, 0, True, None), -math.inf)[None, None]
            return llama(x, position_embeddings=turns, attention_mask=mask)[0]
    case("llama", Llama(), rand(2, 5, 16))


def positions():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as interleaved, create_sinusoidal_positions
    from transformers.models.t5.modeling_t5 import T5Attention
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    at = torch.tensor([0, 1, 7, 100, 1000, 5000])

    def halves(scaling=None, base=10000.0):
        parameters = {"rope_type": "default", "rope_theta": base} | (scaling or {})
        config = LlamaConfig(hidden_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
                             max_position_embeddings=8192, rope_parameters=parameters)
        turn = LlamaRotaryEmbedding(config)
        def f(x, at):
            cos, sin = turn(x, at[None])
            return apply_rotary_pos_emb(x, x, cos, sin)[0]
        return f
    x = rand(1, 1, 6, 16)
    case("rope", halves(), x, at)
    case("rope_linear", halves({"rope_type": "linear", "factor": 4.0}), x, at)
    case("rope_llama3", halves({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 256}, 5e5), x, at)
    case("rope_yarn", halves({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}), x, at)
    table = create_sinusoidal_positions(5001, 4)
    def gptj(x, at):
        sin, cos = table[at][None].split(2, -1)
        turned = interleaved(x[..., :4].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat([turned, x[..., 4:]], -1)
    case("rope_interleaved", gptj, rand(1, 2, 6, 6), at)
    for both in (True, False):
        far = torch.arange(-300, 301)
        bucket = T5Attention._relative_position_bucket(far, bidirectional=both, num_buckets=32, max_distance=128)
        KEPT[f"buckets_{int(both)}/y"] = bucket.float()
        few = T5Attention._relative_position_bucket(far, bidirectional=both, num_buckets=20, max_distance=100)
        KEPT[f"buckets_few_{int(both)}/y"] = few.float()
    for heads in (8, 6):
        slopes = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        KEPT[f"alibi_{heads}/y"] = slopes
    p = torch.arange(4).float()[:, None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6.0)
    KEPT["sinusoids/y"] = torch.stack([p.sin(), p.cos()], -1).flatten(1)


def recurrent():
    state = lambda f, x, h: f(x, h)
    states = lambda f, x, h, c: f(x, (h, c))
    case("lstm_states", nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), rand(2, 3, 3), rand(4, 2, 4), rand(4, 2, 4), call=states)
    case("lstm_projected", nn.LSTM(3, 4, 2, proj_size=2, batch_first=True), rand(2, 3, 3))
    case("gru_states", nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), rand(2, 3, 3), rand(4, 2, 4), call=state)
    case("gru_unbiased", nn.GRU(2, 3, bias=False, batch_first=True), rand(2, 4, 2))
    case("gru", nn.GRU(2, 3, batch_first=True), rand(2, 3, 2))
    case("rnn_relu", nn.RNN(2, 3, nonlinearity="relu", batch_first=True), rand(2, 3, 2), rand(1, 2, 3), call=state)
    case("rnn", nn.RNN(2, 3, 2, batch_first=True), rand(2, 3, 2))

    def packed(f, x, lengths):
        parts = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, last = f(parts)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], last
    lengths = torch.tensor([2, 4, 1])
    case("lstm_lengths", nn.LSTM(2, 3, bidirectional=True, batch_first=True), rand(3, 4, 2), lengths, call=packed)
    case("gru_lengths", nn.GRU(2, 3, 2, batch_first=True), rand(3, 4, 2), lengths, call=packed)
    case("lstm_cell", nn.LSTMCell(3, 2), rand(2, 3), rand(2, 2), rand(2, 2), call=states)
    case("gru_cell", nn.GRUCell(3, 2), rand(2, 3), rand(2, 2))
    case("rnn_cell", nn.RNNCell(3, 2), rand(2, 3), rand(2, 2))


def others():
    case("embedding_padding", nn.Embedding(5, 3, padding_idx=1), torch.tensor([[0, 1, 4], [1, 2, 0]]))
    case("prelu", nn.PReLU(3), rand(2, 3, 4))
    case("upsample", nn.Upsample(scale_factor=2, mode="bilinear"), rand(1, 2, 3, 2))


def main():
    torch.manual_seed(0)
    for record in (convolutions, pools, norms, attention, positions, recurrent, others):
        record()
    volumes_and_bags()
    alignments()
    save("torch/layers_and_options.safetensors", KEPT)
    print(os.path.getsize("torch/layers_and_options.safetensors"), "bytes")


def volumes_and_bags():
    case("transposed3d", nn.ConvTranspose3d(2, 3, (3, 2, 2), stride=(2, 1, 2), padding=(1, 0, 1), output_padding=(1, 0, 1)), rand(2, 2, 3, 2, 3))
    case("transposed3d_grouped", nn.ConvTranspose3d(4, 2, (2, 1, 3), stride=(3, 2, 1), dilation=(2, 1, 1), groups=2, bias=False), rand(1, 4, 2, 3, 2))
    case("transposed3d_cut", nn.ConvTranspose3d(1, 1, (4, 1, 1), stride=1, padding=(3, 0, 0)), rand(1, 1, 4, 2, 1))
    bags = torch.tensor([[0, 1, 4, 4], [1, 1, 2, 0], [1, 1, 1, 1]])
    for mode in ["sum", "mean", "max"]:
        case(f"bag_{mode}", nn.EmbeddingBag(5, 3, mode=mode), bags)
        case(f"bag_{mode}_padding", nn.EmbeddingBag(5, 3, mode=mode, padding_idx=1), bags)
    weighted = lambda m, x, w: m(x, per_sample_weights=w)
    case("bag_weighted", nn.EmbeddingBag(5, 3, mode="sum", padding_idx=1), bags, rand(3, 4), call=weighted)
    norm = lambda x, v, g: F.conv1d(x, torch._weight_norm(v, g, 0), padding=1)
    case("weight_norm", norm, rand(1, 2, 5), params={"v": rand(3, 2, 3), "g": rand(3, 1, 1)})
    for mode in ["bilinear", "bicubic"]:
        for n, size in enumerate([(3, 2), (4, 12), (1, 1), (7, 9)]):
            smooth = lambda x, mode=mode, size=size: F.interpolate(x, size, mode=mode, antialias=True)
            case(f"antialias_{mode}_{n}", smooth, rand(1, 2, 7, 9))


def alignments():
    # The labels of the last example do not fit into its steps.
    labels = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 2, 2]])
    steps, counts = torch.tensor([6, 4, 4]), torch.tensor([3, 2, 3])
    for reduction in ["none", "mean", "sum"]:
        ctc = lambda x, y, r=reduction: F.ctc_loss(x.log_softmax(2), y, torch.tensor([6, 6, 6]), torch.tensor([3, 3, 3]), blank=4, reduction=r)
        case(f"ctc_all_{reduction}", ctc, rand(6, 3, 5), labels)
        ctc = lambda x, y, s, n, r=reduction: F.ctc_loss(x.log_softmax(2), y, s, n, reduction=r, zero_infinity=True)
        case(f"ctc_{reduction}", ctc, rand(6, 3, 4), labels, steps, counts)
    ctc = lambda x, y, s, n: F.ctc_loss(x.log_softmax(2), y, s, n, reduction="none")
    case("ctc_infinite", ctc, rand(6, 3, 4), labels, steps, counts, grad=False)
    none = torch.tensor([0, 1, 0])
    ctc = lambda x, y, s, n: F.ctc_loss(x.log_softmax(2), y, s, n, reduction="sum")
    case("ctc_empty", ctc, rand(6, 3, 4), labels, steps, none)


if __name__ == "__main__":
    main()
