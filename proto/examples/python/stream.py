"""Sends several checks on one stream, with code generated from the .proto files of this repository.

    pip install grpcio-tools
    python proto/examples/python/stream.py 127.0.0.1:8081
"""

import pathlib
import queue
import sys
import tempfile

import grpc
from grpc_tools import protoc

# A project would generate this code once and commit it. The example generates it into a temporary folder.
protos = pathlib.Path(__file__).parents[2] / "proto"
generated = tempfile.TemporaryDirectory()
files = [str(path.relative_to(protos)) for path in protos.rglob("*.proto")]
bundled = str(pathlib.Path(protoc.__file__).parent / "_proto")
out = [f"--python_out={generated.name}", f"--grpc_python_out={generated.name}"]
assert protoc.main(["protoc", f"-I{protos}", f"-I{bundled}", *out, *files]) == 0
for folder in [folder for folder in pathlib.Path(generated.name).rglob("*") if folder.is_dir()]:
    (folder / "__init__.py").touch()  # makes these packages take precedence over others of the same name
sys.path.insert(0, generated.name)

from sluicegate.v1 import decisions_pb2, decisions_pb2_grpc  # noqa: E402

stub = decisions_pb2_grpc.DecisionServiceStub(grpc.insecure_channel(sys.argv[1]))

# Frames in this queue are sent; None ends the stream.
frames = queue.SimpleQueue()
responses = stub.Stream(iter(frames.get, None))

frame = decisions_pb2.CheckFrame()
for number in range(5):
    check = frame.checks.add(id=number)
    check.request.domain = "example"
    check.request.descriptors.add().entries.add(key="user", value="stream")
frames.put(frame)

waiting = len(frame.checks)
while waiting:
    for response in next(responses).responses:
        waiting -= 1
        status = response.verdict.statuses[0]
        if response.verdict.allowed:
            print(f"{response.id}: allowed, {status.remaining} remaining")
        else:
            print(f"{response.id}: denied, retry after {status.retry_after_us / 1e6:.1f} s")
frames.put(None)
assert next(responses, None) is None
