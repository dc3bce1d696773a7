"""What ranks leave in the file for the results of a function."""

import os

from unisono.launch.ray.function_program import NO_RESULTS, append_result, read_results


def test_results_are_whole_whoever_is_killed_meanwhile(tmp_path):
    path = tmp_path / "results"
    path.write_bytes(NO_RESULTS)
    append_result(path, 1, b"first")
    with path.open("ab") as torn:
        torn.write(b"half of a resu")
    append_result(path, 3, b"")
    append_result(path, 2, bytes(range(256)) * 999)
    file = os.open(path, os.O_RDONLY)
    try:
        assert read_results(file) == {1: b"first", 3: b"", 2: bytes(range(256)) * 999}
    finally:
        os.close(file)
