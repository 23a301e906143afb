"""Many checks on one stream, with code generated from the .proto files of this repository.

    pip install grpcio-tools
    python proto/examples/python/stream.py 127.0.0.1:8081
"""

import pathlib
import queue
import sys
import tempfile

import grpc
from grpc_tools import protoc

# Generated into a folder of its own and imported from there; a project would generate once and keep the result.
protos = pathlib.Path(__file__).parents[2] / "proto"
generated = tempfile.TemporaryDirectory()
files = [str(path.relative_to(protos)) for path in protos.rglob("*.proto")]
bundled = str(pathlib.Path(protoc.__file__).parent / "_proto")
out = [f"--python_out={generated.name}", f"--grpc_python_out={generated.name}"]
assert protoc.main(["protoc", f"-I{protos}", f"-I{bundled}", *out, *files]) == 0
for folder in [folder for folder in pathlib.Path(generated.name).rglob("*") if folder.is_dir()]:
    (folder / "__init__.py").touch()  # packages that are found before others of the same name
sys.path.insert(0, generated.name)

from sluicegate.v1 import decisions_pb2, decisions_pb2_grpc  # noqa: E402

stub = decisions_pb2_grpc.DecisionServiceStub(grpc.insecure_channel(sys.argv[1]))

# Whatever is put into the queue is sent; None ends the stream.
frames = queue.SimpleQueue()
answers = stub.Stream(iter(frames.get, None))

frame = decisions_pb2.CheckFrame()
for number in range(5):
    check = frame.checks.add(id=number)
    check.request.domain = "example"
    check.request.descriptors.add().entries.add(key="user", value="stream")
frames.put(frame)

waiting = len(frame.checks)
while waiting:
    for answer in next(answers).answers:
        waiting -= 1
        status = answer.verdict.statuses[0]
        if answer.verdict.allowed:
            print(f"{answer.id}: allowed, {status.remaining} remaining")
        else:
            print(f"{answer.id}: refused, come back in {status.retry_after_us / 1e6:.1f} s")
frames.put(None)
assert next(answers, None) is None
