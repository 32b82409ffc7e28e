"""The way of one call of `attend` to the exponential: few frames in two files, and each question asked once."""

import sys

import jax
import numpy as np
import pytest

import posx
from posx.attention import attend
from tests.lowered import shape_of

FOLDER = posx.__path__[0]
DIMS = posx.Dims(512, 8, 64, 1, 512)


def trace(spec, length):
    """Trace one call; return the Python calls inside posx and the frames above the row maxima, functions by file."""
    encoding, q = posx.build(spec, DIMS), shape_of(1, length, 8, 64)
    pos, calls, frames = np.arange(length, dtype=np.int32), [], []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            calls.append(frame.f_code.co_name)
            if frame.f_code.co_name == "row_maxima":
                while frame := frame.f_back:
                    if frame.f_code.co_filename.startswith(FOLDER):
                        frames.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(count)
    try:
        jax.eval_shape(lambda q: attend(encoding, {}, q, q, q, pos, executor="blockwise"), q)
    finally:
        sys.setprofile(None)
    return calls, frames


@pytest.mark.parametrize(("spec", "most"), [("nope", 140), ("alibi", 150), ("rope", 190)])
def test_a_call_asks_each_question_once(spec, most):
    trace(spec, 256)  # a layer before
    assert len(trace(spec, 512)[0]) <= most


def test_attend_reaches_the_exponential_in_six_frames():
    """`attend`, its run, `blockwise`, the pass, a block of queries, a block of keys: in two files, without a climb."""
    _, frames = trace("alibi", 512)
    files = [file for file, _ in frames]
    assert len(frames) <= 6 and len(set(files)) == 2 and files == sorted(files, reverse=True)
