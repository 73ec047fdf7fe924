"""What platforms ask a shard: health, reflection, status."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import shardwell
from harness.polling import PATIENCE_S
from harness.threads import in_background
from harness.tokens import bearing
from shardwell_server import ShardConfig, ShardServer

SERVICE = "shardwell.v1.ParameterServerService"
TABLE_SERVICE = "shardwell.v1.TableService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", SERVICE, TABLE_SERVICE])
def test_serving_when_ready(cluster, service) -> None:
    with bearing(grpc.insecure_channel(cluster(1).target)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S
        )
    assert answer.status == SERVING


def test_an_unknown_service_is_not_found(cluster) -> None:
    request = health_pb2.HealthCheckRequest(service="other")
    target = cluster(1).target
    with bearing(grpc.insecure_channel(target)) as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_not_serving_while_stopping(cluster) -> None:
    running = cluster(1, grace_s=1.0)
    with bearing(grpc.insecure_channel(running.target)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_S
        )
        assert next(watch).status == SERVING
        stopping = in_background(running.close)
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError):
            next(watch)
        stopping.result(PATIENCE_S)


def test_not_serving_before_the_start() -> None:
    server = ShardServer(ShardConfig(shard_index=0, shard_count=1))
    try:
        with (
            bearing(grpc.insecure_channel(server.address)) as channel,
            pytest.raises(grpc.RpcError),
        ):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=0.3)
    finally:
        server.start()
        server.stop()


@pytest.mark.parametrize("reflection", [True, False])
def test_reflection_is_a_flag(reflection) -> None:
    config = ShardConfig(shard_index=0, shard_count=1, reflection=reflection)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with ShardServer(config) as server, bearing(grpc.insecure_channel(server.address)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        if not reflection:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S)
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, TABLE_SERVICE, "grpc.health.v1.Health"} <= names
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE_S)
        files = [
            FileDescriptorProto.FromString(raw)
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        assert "shardwell/v1/parameter_server.proto" in {file.name for file in files}


def test_status_tells_what_a_shard_holds(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=64)
    size = 101
    one, two = (connect(running, name) for name in ("one", "two"))
    optimizer = shardwell.Adam(learning_rate=0.25)
    models = [
        client.parameter("model", size=size, optimizer=optimizer, worker_count=3)
        for client in (one, two)
    ]
    for index, status in enumerate(one.status()):
        assert (status.cluster_id, status.shard_index) == (running.cluster_id, index)
        assert (status.shard_count, status.address) == (2, running.addresses[index])
        assert status.software_version == shardwell.__version__
        (parameter,) = status.parameters
        assert not parameter.initialized
        assert (parameter.slice_offset, parameter.slice_size) == [(0, 52), (52, 49)][index]
        assert status.stored_bytes == 4 * parameter.slice_size * 4  # weights, sum, two moments
        assert list(parameter.missing_worker_ids) == ["one", "two"]
        assert parameter.unknown_worker_count == 1
        assert parameter.learning_rate == 0.25
        assert parameter.spec == models[0].spec
    models[0].init(np.zeros(size, np.float32))
    models[1].put_gradient(np.ones(size, np.float32))
    for status in two.status():
        (parameter,) = status.parameters
        assert parameter.initialized
        assert list(parameter.contributed_worker_ids) == ["two"]
        assert list(parameter.missing_worker_ids) == ["one"]
        assert parameter.unknown_worker_count == 1
        assert (parameter.version_min, parameter.version_max) == (0, 0)
        assert parameter.counted_chunk_count == 2
        assert parameter.duplicate_chunk_count == 0
