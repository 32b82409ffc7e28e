"""`python -m benchmarks profile`: products and their sizes, scopes, own times, the table."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import profiling
from tests.benchmarks.tables import cells


def test_program_text_names_products_and_scopes():
    @jax.jit
    def program(x, w):
        y = x @ w
        with jax.named_scope("attention"):
            products = y @ y.T
            weights = jnp.exp(products - products.max())
        with jax.named_scope("optimizer"):
            return weights, jnp.sqrt(w + 1)

    text = program.lower(jnp.ones((6, 3)), jnp.ones((3, 4))).compile().as_text()
    found = dict(profiling.parsed(text).values())
    assert found["weights: products 6 x 4 over 3"] == 2 * 6 * 4 * 3
    assert found["attention: products 6 x 6 over 4"] == 2 * 6 * 6 * 4
    assert {"attention: exponentials", "attention: sums and maxima", "optimizer"} <= found.keys()


def test_program_text_of_a_gpu_names_the_calls_of_its_libraries():
    text = """
ENTRY %main (x: bf16[6,3], w: bf16[3,4]) -> f32[6,4] {
  %x.1 = bf16[6,3]{1,0} parameter(0)
  %w.1 = bf16[3,4]{1,0} parameter(1)
  %cublas-gemm.1 = (f32[6,4]{1,0}, s8[4194304]{0}) custom-call(%x.1, %w.1), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/mlp/dot_general"}, backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %fmha.1 = (bf16[1,2,8,4]{3,2,1,0}, u8[0]{0}) custom-call(%x.1, %w.1), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/attention/dot_product_attention"}
  %fmha.2 = (bf16[1,2,8,4]{3,2,1,0}, u8[0]{0}) custom-call(%x.1, %w.1), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(step)/attention/dot_product_attention"}
  ROOT %convert.3 = f32[6,4]{1,0} convert(%w.1), metadata={op_name="jit(step)/mlp/convert"}
}
"""  # noqa: E501
    found = profiling.parsed(text)
    assert found["cublas-gemm.1"] == ("weights: products 6 x 4 over 3", 2.0 * 6 * 4 * 3)
    assert [found[f"fmha.{n}"].group for n in (1, 2)] == ["attention: cuDNN, forward", "attention: cuDNN, backward"]
    assert found["convert.3"].group == "layers: casts"


def test_own_times_leave_out_the_events_inside():
    events = [(0.0, 10.0, "loop"), (1.0, 4.0, "dot"), (5.0, 8.0, "call"), (6.0, 7.0, "dot"), (12.0, 13.0, "exp")]
    own, runs, wall = profiling.own_times([profiling.Event(*event, kernel=event[2]) for event in events])
    assert own == {"loop": 4.0, "dot": 4.0, "call": 2.0, "exp": 1.0}
    assert runs["dot"] == 2
    assert wall == 13.0


def test_memory_that_a_product_sets_is_no_second_product():
    """On a GPU one call of cuBLAS sets its workspace, multiplies, and may sum parts."""
    kernels = ["Memset", "nvjet", "splitKreduce"] * 2
    events = [profiling.Event(n, n + 1.0, "custom-call.1", kernel) for n, kernel in enumerate(kernels)]
    own, runs, _ = profiling.own_times(events)
    assert own == {"custom-call.1": 6.0} and runs == {"custom-call.1": 2}


@pytest.mark.slow
def test_profile_divides_the_whole_step(bench, capsys):
    bench.main(["profile", "--shape=tiny", "--encodings=rope", "--steps=2"])
    table = cells(capsys.readouterr().out)
    assert {"dispatch", "optimizer", "cross-entropy", "attention: products 2 x 2 x 16 x 16 over 16"} <= table.keys()
    assert sum(float(row[1].rstrip("%")) for row in table.values()) == pytest.approx(100, abs=3)
