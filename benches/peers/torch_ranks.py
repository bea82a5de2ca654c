"""Times a data-parallel step of PyTorch's DDP over Gloo on CPUs, to compare with slabwise.

Prints a line of JSON on rank 0 with the milliseconds of each step.

torch_ranks.py BATCH STEPS THREADS PORT

Started by an MPI launcher, whose variables say the rank. The model, its optimizer and its sizes are
those of slabwise's gpt; BATCH is that of all ranks together.
"""

import json
import os
import sys
import time


def end(**fields):
    print(json.dumps(fields), flush=True)
    sys.exit(0)


def variable(*names, default=None):
    return next((os.environ[name] for name in names if name in os.environ), default)


RANK = int(variable("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", default="0"))
RANKS = int(variable("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", default="1"))

try:
    import torch
    import torch.distributed as distributed
    from torch import nn
except ImportError:
    end(skipped="torch is not installed")
F = nn.functional

WIDTH, HEADS, LAYERS, LENGTH, KINDS = 256, 4, 4, 128, 1024
WARM_UP = 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.joined = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.joined(x).chunk(3, dim=-1)
        heads = [part.reshape(batch, length, HEADS, -1).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(KINDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, KINDS, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.norm(self.layers(x)))


def main():
    batch, steps, threads, port = (int(word) for word in sys.argv[1:5])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Gpt()
    weights = sum(weight.numel() for weight in model.parameters())
    if RANKS > 1:
        address = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", address, rank=RANK, world_size=RANKS)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    own = batch // RANKS
    tokens, labels = (torch.randint(0, KINDS, (own, LENGTH)) for _ in range(2))

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - start)

    times = [step() for _ in range(WARM_UP + steps)][WARM_UP:]
    if RANK == 0:
        print(json.dumps({"ms": [round(t, 3) for t in times], "weights": weights}), flush=True)
    if RANKS > 1:
        distributed.destroy_process_group()


main()
