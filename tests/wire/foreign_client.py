"""Calls the service by reflection, and its health service, with only grpcio. Usage: foreign_client.py HOST:PORT|unix:PATH"""
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"

channel = grpc.insecure_channel(sys.argv[1])
database = ProtoReflectionDescriptorDatabase(channel)
print(*database.get_services(), sep="\n")
method = DescriptorPool(database).FindServiceByName(SERVICE).methods_by_name["ShouldRateLimit"]
Request, Response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
call = channel.unary_unary(f"/{SERVICE}/ShouldRateLimit", Request.SerializeToString, Response.FromString)

health = health_pb2_grpc.HealthStub(channel)
names = health_pb2.HealthCheckResponse.ServingStatus
statuses = [health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", SERVICE)]
print("health:", ", ".join(names.Name(status) for status in statuses))
try:
    health.Check(health_pb2.HealthCheckRequest(service="unknown"))
except grpc.RpcError as error:
    print(error.code().name)

request = Request(domain="example")
request.descriptors.add().entries.add(key="user", value="python")
for _ in range(4):
    response = call(request)
    code = Response.DESCRIPTOR.enum_types_by_name["Code"].values_by_number[response.overall_code].name
    print(code, response.statuses[0].limit_remaining)
try:
    call(Request())
except grpc.RpcError as error:
    print(error.code().name)
