"""A jitted step of JAX, beside slabwise's: prints the median milliseconds and the peak of bytes in use.

jax_step.py mlp|cnn BATCH
"""

import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("jax is not installed")
if jax.default_backend() != "gpu":
    sys.exit("jax sees no GPU")

jax.config.update("jax_default_matmul_precision", "highest")
name, batch = sys.argv[1], int(sys.argv[2])
WARM_UP, GROUP, PATIENCE = 20, 10, 1.0
keys = iter(jax.random.split(jax.random.PRNGKey(0), 64))


def dense(n, m):
    return jax.random.normal(next(keys), (n, m)) / n ** 0.5, jnp.zeros(m)


def conv(n, m):
    return jax.random.normal(next(keys), (m, n, 5, 5)) / (25 * n) ** 0.5, jnp.zeros(m)


def pooled(x, layer):
    x = jax.lax.conv_general_dilated(x, layer[0], (1, 1), "SAME") + layer[1][:, None, None]
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


if name == "mlp":
    weights = [dense(784, 512), dense(512, 256), dense(256, 10)]
    example = (784,)
else:
    weights = [conv(1, 32), conv(32, 64), dense(64 * 7 * 7, 512), dense(512, 10)]
    example = (1, 28, 28)


def loss_of(weights, x, labels):
    layers = weights
    if name == "cnn":
        x = pooled(pooled(x, weights[0]), weights[1]).reshape(x.shape[0], -1)
        layers = weights[2:]
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    x = x @ layers[-1][0] + layers[-1][1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))


def step(weights, state, x, labels):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, labels)
    tree = jax.tree_util.tree_map
    if name == "mlp":
        state = tree(lambda v, g: 0.9 * v + g, state, gradients)
        return tree(lambda w, v: w - 0.01 * v, weights, state), state, loss
    m, v, t = state
    t = t + 1
    m = tree(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = tree(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
    move = lambda w, m, v: w - 1e-3 * (m / (1 - 0.9 ** t)) / (jnp.sqrt(v / (1 - 0.999 ** t)) + 1e-8)
    return tree(move, weights, m, v), (m, v, t), loss


zeros = jax.tree_util.tree_map(jnp.zeros_like, weights)
state = zeros if name == "mlp" else (zeros, jax.tree_util.tree_map(jnp.zeros_like, weights), jnp.zeros(()))
jitted = jax.jit(step, donate_argnums=(0, 1))
host = (jax.device_get(jax.random.uniform(next(keys), (batch, *example))), jax.device_get(jax.random.randint(next(keys), (batch,), 0, 10)))


def group(n):
    global weights, state
    for _ in range(n):
        weights, state, loss = jitted(weights, state, *host)
    loss.block_until_ready()


group(WARM_UP)
times, began = [], time.perf_counter()
while time.perf_counter() - began < PATIENCE or len(times) < 5:
    start = time.perf_counter()
    group(GROUP)
    times.append((time.perf_counter() - start) * 1e3 / GROUP)
print(statistics.median(times), jax.local_devices()[0].memory_stats()["peak_bytes_in_use"])
