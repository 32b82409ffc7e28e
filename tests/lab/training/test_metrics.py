"""TensorBoard's copy of the metrics, read as TensorBoard reads it."""

import struct

from posx.lab.training.loop import close_board, open_board


def shown(folder) -> list[int]:
    """The steps of "loss": a session start drops the events at its step and beyond, as in TensorBoard."""
    from tensorboardX.proto import event_pb2

    steps: list[int] = []
    for path in sorted(folder.iterdir()):
        raw, at = path.read_bytes(), 0
        while at + 12 <= len(raw):
            (size,) = struct.unpack("<Q", raw[at : at + 8])
            event = event_pb2.Event()
            event.ParseFromString(raw[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return steps


def test_a_resumed_run_shows_every_step_once(tmp_path):
    for attempt, (start, last) in enumerate(((0, 5), (2, 7))):
        board = open_board(tmp_path, f".{attempt}", start)
        for step in range(start + 1, last + 1):
            board.add_scalar("loss", 1.0, step)
        close_board(board)
    assert shown(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
