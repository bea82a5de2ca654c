"""A step of PyTorch, beside slabwise's: prints the median milliseconds and the peak of reserved bytes.

torch_step.py eager|compile|reduce-overhead|graph mlp|cnn BATCH
torch_step.py gemm N f32|bf16
torch_step.py copy - -
"""

import statistics
import sys
import time

try:
    import torch
    from torch import nn
except ImportError:
    sys.exit("torch is not installed")
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
WARM_UP, GROUP, PATIENCE = 20, 10, 1.0


def report(run):
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < PATIENCE or len(times) < 5:
        start = time.perf_counter()
        for _ in range(GROUP):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / GROUP)
    print(statistics.median(times), torch.cuda.max_memory_reserved())


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10))


def step(mode, name, batch):
    capturable = mode == "graph"
    model = {"mlp": mlp, "cnn": cnn}[name]().cuda()
    if name == "mlp":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=capturable)
    example = (784,) if name == "mlp" else (1, 28, 28)
    host = torch.rand(batch, *example).pin_memory(), torch.randint(0, 10, (batch,)).pin_memory()
    forward = model
    if mode in ("compile", "reduce-overhead"):
        forward = torch.compile(model, mode="default" if mode == "compile" else mode)

    def work(images, labels):
        optimizer.zero_grad(set_to_none=not capturable)
        loss = nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    if not capturable:
        report(lambda: work(*(t.cuda(non_blocking=True) for t in host)))
        return
    static = [t.cuda() for t in host]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*static)

    def replay():
        for to, source in zip(static, host):
            to.copy_(source, non_blocking=True)
        graph.replay()

    report(replay)


what, first, second = sys.argv[1:4]
if what == "gemm":
    dtype = torch.float32 if second == "f32" else torch.bfloat16
    a, b = (torch.rand(int(first), int(first), device="cuda").sub(0.5).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    report(lambda: torch.matmul(a, b, out=c))
elif what == "copy":
    x = torch.zeros(1 << 27, device="cuda")
    y = torch.empty_like(x)
    report(lambda: torch.add(x, 1.0, out=y))
else:
    step(what, first, int(second))
