"""Eight threads over shared layers, freezing, gradients and everything else, on a Python without
GIL: run by free_threaded.sh, as `python free_threaded.py [SECONDS]`, under the thread sanitizer."""

import sys
import threading
import time

import numpy as np

import mha

assert not sys._is_gil_enabled(), "importing mha switched the GIL on"

NUM_THREADS = 8
rng = np.random.default_rng(0)


def f(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def new_layer():
    return mha.MultiHeadAttention(32, 4, num_kv_heads=2, rng=0)


shared, frozen = new_layer(), new_layer().freeze()
x, q, bias, large = f(2, 40, 32), f(2, 4, 60, 16), f(4, 60, 60), f(1, 4, 600, 32)
grad = f(2, 40, 32)
wide = large.swapaxes(1, 2).copy().swapaxes(1, 2)  # its rows lie apart
keys = f(1, 4, 2000, 32)
W, b, w_v = f(16, 8), f(32), f(8)
layers_to_freeze = [new_layer() for _ in range(4000)]
attend = mha.scaled_dot_product_attention


def pulled(output_and_pullback, cotangent=None):
    output, pullback = output_and_pullback
    return [output, *(g for g in pullback(output if cotangent is None else cotangent)
                      if g is not None)]


def with_threads(call):
    with mha.threads(2):
        return call()


CALLS = {
    "layer": lambda turn: shared(x, causal=True),
    "layer with weights": lambda turn: shared(x, return_weights=True, return_lse=True),
    "layer's gradients": lambda turn: pulled(shared.vjp(x), grad),
    "frozen": lambda turn: frozen(x),
    "freezing a shared layer": lambda turn: layers_to_freeze[turn].freeze()(x),
    "freezing": lambda turn: new_layer().freeze()(x),
    "attention": lambda turn: attend(q, q, q, bias=bias),
    "attention on threads": lambda turn: with_threads(lambda: attend(large, large, large)),
    "rows apart": lambda turn: with_threads(lambda: attend(wide, wide, wide)),
    "few queries": lambda turn: with_threads(lambda: attend(keys[:, :, :2], keys, keys)),
    "gradients": lambda turn: pulled(mha.scaled_dot_product_attention_vjp(q, q, q, bias=bias)),
    "gradients on threads": lambda turn: with_threads(
        lambda: pulled(mha.scaled_dot_product_attention_vjp(wide, wide, wide))),
    "additive attention": lambda turn: pulled(mha.additive_attention_vjp(q, q, q, W, W, w_v)),
    "dropout": lambda turn: attend(q, q, q, dropout=0.2, rng=3),
    "steps": lambda turn: mha.merge_heads(mha.split_heads(mha.linear(x, shared.W_o, b), 4)),
    "parts": lambda turn: mha.merge_attention(*zip(*(
        attend(q, q[:, :, part], q[:, :, part], return_lse=True)
        for part in (slice(0, 20), slice(20, None))), strict=True)),
    "number of threads": lambda turn: (mha.set_num_threads(2), mha.get_num_threads())[1],
}


def bits(result):
    if isinstance(result, np.ndarray):
        return result.tobytes()
    return tuple(map(bits, result)) if isinstance(result, (tuple, list)) else result


def main(seconds=20.0):
    mha.set_num_threads(2)
    wanted = {name: bits(call(-1)) for name, call in CALLS.items()}
    start, errors, done = threading.Barrier(NUM_THREADS), [], [0] * NUM_THREADS
    until = time.monotonic() + seconds

    def work(number):
        names = list(CALLS)
        np.random.default_rng(number).shuffle(names)
        start.wait()
        try:
            while time.monotonic() < until and not errors:
                for name in names:
                    turn = min(done[number] // len(names), len(layers_to_freeze) - 2)
                    if bits(CALLS[name](turn)) != wanted[name]:
                        raise AssertionError(f"{name}: other bits than alone")
                    done[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not sys._is_gil_enabled()
    assert min(done) >= len(CALLS), done
    print(f"{sum(done)} calls on {NUM_THREADS} threads, all with the bits they have alone; the GIL"
          " stayed off")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
