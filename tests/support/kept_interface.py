"""The import paths and signatures of Bagua 0.9 that this version keeps: scripts that were written for it go on working.

The tables are the interface as it was specified, not what the code says now. A parameter may have got a default, and
parameters may have been added behind the others; names, order and defaults stay.
"""

from __future__ import annotations

PATHS: dict[str, set[str]] = {
    "bagua.torch_api": {
        *("get_backend", "init_process_group", "send", "recv", "barrier", "broadcast", "ReduceOp"),
        *("BaguaModule", "BaguaTensor", "get_rank", "get_world_size", "get_local_rank", "get_local_size"),
        *("allgather", "allreduce", "alltoall", "alltoall_v", "gather", "reduce", "reduce_scatter", "scatter"),
        *("allgather_inplace", "allreduce_inplace", "alltoall_inplace", "alltoall_v_inplace", "gather_inplace"),
        *("reduce_inplace", "reduce_scatter_inplace", "scatter_inplace"),
        *("communication", "algorithms", "data_parallel"),
    },
    "bagua.service": {"AutotuneService", "AutotuneClient"},
    "bagua.service.autotune_task_manager": {"AutotuneTaskManager"},
    "bagua.bagua_define": {
        *("BaguaHyperparameter", "TensorDeclaration", "TensorDtype", "BaguaCoreTelemetrySpan"),
        "get_tensor_declaration_bytes",
    },
    "bagua.torch_api.communication": {
        *("new_group", "from_torch_group", "is_initialized", "broadcast_object", "broadcast_coalesced"),
        *("allreduce_coalesced_inplace", "BaguaProcessGroup", "get_communicator", "ReduceOp", "get_backend"),
        *("_get_default_group", "_rank_not_in_group", "_rank_not_in_comm", "_torch_to_bagua_pg_map"),
        *("CommMember", "comm"),
    },
    "bagua.torch_api.env": {
        *("get_world_size", "get_rank", "get_local_rank", "get_local_size", "get_node_rank", "get_master_addr"),
        *("get_default_bucket_size", "get_bagua_service_port", "get_autotune_level", "get_autotune_max_samples"),
        *("get_autotune_sampling_confidence_time_s", "get_autotune_warmup_time_s", "get_autotune_server_wait_time"),
        *("get_is_output_autotune_log", "is_report_metrics_switch_on", "find_free_network_port"),
    },
    "bagua.torch_api.bucket": {"BaguaBucket"},
    "bagua.torch_api.checkpoint": {"load_checkpoint", "save_checkpoint"},
    "bagua.torch_api.model_parallel.moe": {"MoE"},
    "bagua.torch_api.model_parallel.moe.layer": {"MoE"},
    "bagua.torch_api.tensor": {"BaguaTensor"},
    "bagua.torch_api.distributed": {"BaguaModule"},
    "bagua.torch_api.contrib": {
        *("CacheLoader", "CachedDataset", "SyncBatchNorm", "fuse_optimizer"),
        *("LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"),
    },
    "bagua.torch_api.contrib.cache_loader": {"CacheLoader"},
    "bagua.torch_api.contrib.cached_dataset": {"CachedDataset"},
    "bagua.torch_api.contrib.fuse.optimizer": {
        *("calculate_mutual_groups", "fuse_optimizer", "fuse_step", "is_fused_optimizer"),
    },
    "bagua.torch_api.contrib.utils.redis_store": {"RedisStore"},
    "bagua.torch_api.contrib.utils.store": {"ClusterStore", "Store"},
    "bagua.torch_api.utils": {
        *("flatten", "unflatten", "apply_flattened_call", "apply_flattened_call_all", "check_contiguous"),
        *("get_flattened_tensor", "to_bagua_datatype", "average_by_removing_extreme_values", "StatisticalAverage"),
    },
    "bagua.torch_api.data_parallel": {"DistributedDataParallel"},
    "bagua.torch_api.data_parallel.distributed": {
        *("DistributedDataParallel", "DistributedDataParallel_V1_9_0", "to_bagua_process_group"),
        "DistributedDataParallel_V1_9_0_Interface",
    },
    "bagua.torch_api.data_parallel.bagua_distributed": {"BaguaDistributedDataParallel"},
    "bagua.torch_api.data_parallel.functional": {"all_reduce", "torch_reduce_op_to_bagua", "ReduceOp"},
    "bagua.distributed.launch": {"main"},
    "bagua.distributed.run": {"main"},
    "bagua.script.baguarun": {"main"},
    "bagua.torch_api.algorithms": {
        *("Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"),
        *("async_model_average", "base", "bytegrad", "decentralized", "gradient_allreduce", "q_adam"),
    },
    "bagua.torch_api.algorithms.async_model_average": {
        "AsyncModelAverageAlgorithm",
        "AsyncModelAverageAlgorithmImpl",
    },
    "bagua.torch_api.algorithms.base": {"Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"},
    "bagua.torch_api.algorithms.bytegrad": {"ByteGradAlgorithm", "ByteGradAlgorithmImpl"},
    "bagua.torch_api.algorithms.decentralized": {
        *("DecentralizedAlgorithm", "DecentralizedAlgorithmImpl"),
        *("LowPrecisionDecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithmImpl"),
    },
    "bagua.torch_api.algorithms.gradient_allreduce": {
        "GradientAllReduceAlgorithm",
        "GradientAllReduceAlgorithmImpl",
    },
    "bagua.torch_api.algorithms.q_adam": {"QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"},
    "bagua.torch_api.contrib.load_balancing_data_loader": {
        *("LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"),
    },
    "bagua.torch_api.contrib.sync_batchnorm": {"SyncBatchNorm"},
}

SUM = "op=ReduceOp.SUM"
DDP = (
    "module, device_ids=None, output_device=None, dim=0, broadcast_buffers=True, process_group=None, bucket_cap_mb=25, "
    "find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=True, optimizers=[], algorithm=..."
)
CLOSURES = "name=None, module_name=None, getter_closure=None, setter_closure=None"

# As one would write the parameters, without self. `...` stands for a default that is an object.
SIGNATURES: dict[str, str] = {
    "init_process_group": "store=None, rank=-1, world_size=-1, local_world_size=-1",
    "get_backend": "model_name",
    "communication.is_initialized": "",
    "communication.new_group": "ranks=None, stream=None",
    "communication.from_torch_group": "group, stream=None",
    "communication.get_communicator": "group_name, comm_name",
    "communication._rank_not_in_comm": "comm=None",
    "communication._rank_not_in_group": "group=None",
    "communication.BaguaProcessGroup.get_global_communicator": "",
    "communication.BaguaProcessGroup.get_inter_node_communicator": "",
    "communication.BaguaProcessGroup.get_intra_node_communicator": "",
    # Of the core's communicator, which was given what `bagua_backend_tensor()` returns.
    **{
        f"communication.BaguaCommunicator.{name}": parameters
        for name, parameters in {
            **dict.fromkeys(("rank", "nranks", "device_id", "abort", "check_abort", "barrier"), ""),
            **dict.fromkeys(("send", "recv"), "tensor, peer_rank"),
            "broadcast": "tensor, root_rank",
            **dict.fromkeys(("allreduce", "reduce_scatter"), "send_tensor, recv_tensor, op"),
            **dict.fromkeys(("allreduce_inplace", "reduce_scatter_inplace"), "tensor, op"),
            "reduce": "send_tensor, recv_tensor, dst, op",
            "reduce_inplace": "tensor, dst, op",
            **dict.fromkeys(("allgather", "alltoall"), "send_tensor, recv_tensor"),
            **dict.fromkeys(("allgather_inplace", "alltoall_inplace"), "tensor"),
            "gather": "send_tensor, recv_tensor, dst",
            "gather_inplace": "tensor, count, dst",
            "scatter": "send_tensor, recv_tensor, src",
            "scatter_inplace": "tensor, count, src",
            "alltoall_v": "send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs",
            "alltoall_v_inplace": "tensor, counts, displs",
        }.items()
    },
    "send": "tensor, dst, comm=None",
    "recv": "tensor, src, comm=None",
    "broadcast": "tensor, src=0, comm=None",
    "communication.broadcast_object": "obj, src=0, comm=None",
    "communication.broadcast_coalesced": "tensors, src=0, comm=None",
    "communication.allreduce_coalesced_inplace": f"tensors, {SUM}, comm=None",
    "reduce": f"send_tensor, recv_tensor, dst, {SUM}, comm=None",
    "reduce_inplace": f"tensor, dst, {SUM}, comm=None",
    "allreduce": f"send_tensor, recv_tensor, {SUM}, comm=None",
    "allreduce_inplace": f"tensor, {SUM}, comm=None",
    "allgather": "send_tensor, recv_tensor, comm=None",
    "allgather_inplace": "tensor, comm=None",
    "gather": "send_tensor, recv_tensor, dst, comm=None",
    "gather_inplace": "tensor, count, dst, comm=None",
    "scatter": "send_tensor, recv_tensor, src, comm=None",
    "scatter_inplace": "tensor, count, src, comm=None",
    "reduce_scatter": f"send_tensor, recv_tensor, {SUM}, comm=None",
    "reduce_scatter_inplace": f"tensor, {SUM}, comm=None",
    "alltoall": "send_tensor, recv_tensor, comm=None",
    "alltoall_inplace": "tensor, comm=None",
    "alltoall_v": "send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs, comm=None",
    "alltoall_v_inplace": "tensor, counts, displs, comm=None",
    "barrier": "comm=None",
    # The module is `self` in 0.9: the method is also a function now.
    "BaguaModule.with_bagua": "model, optimizers, algorithm, process_group=None, do_flatten=True",
    "BaguaModule.bagua_build_params": "",
    "BaguaTensor.is_bagua_tensor": "",
    "BaguaTensor.ensure_bagua_tensor": CLOSURES,
    "BaguaTensor.to_bagua_tensor": CLOSURES,
    "BaguaTensor.bagua_getter_closure": "",
    "BaguaTensor.bagua_setter_closure": "tensor",
    "BaguaTensor.bagua_backend_tensor": "",
    "BaguaTensor.bagua_ensure_grad": "",
    "BaguaTensor.bagua_mark_communication_ready": "",
    "BaguaTensor.bagua_mark_communication_ready_without_synchronization": "",
    "BaguaTensor.bagua_set_storage": "storage, storage_offset=0",
    "checkpoint.save_checkpoint": "iteration, checkpoints_path, model, optimizer=None, lr_scheduler=None",
    "checkpoint.load_checkpoint": "checkpoints_path, model, optimizer=None, lr_scheduler=None, strict=True",
    "moe.MoE": (
        "hidden_size, expert, num_local_experts=1, k=1, output_dropout_prob=0.0, capacity_factor=1.0, "
        "eval_capacity_factor=1.0, min_capacity=4, noisy_gate_policy=None"
    ),
    "moe.MoE.forward": "hidden_states, used_token=None",
    "bucket.BaguaBucket": "tensors, name, flatten, alignment=1",
    "bucket.BaguaBucket.flattened_tensor": "",
    "bucket.BaguaBucket.check_flatten": "",
    "bucket.BaguaBucket.bytes": "",
    "bucket.BaguaBucket.clear_ops": "",
    "bucket.BaguaBucket.append_python_op": "python_function, group=None",
    "bucket.BaguaBucket.append_centralized_synchronous_op": (
        "hierarchical=False, average=True, scattergather=False, compression=None, group=None"
    ),
    "contrib.LoadBalancingDistributedSampler": (
        "dataset, complexity_fn, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False, random_level=0"
    ),
    "contrib.LoadBalancingDistributedBatchSampler": "sampler, batch_fn, drop_last=False",
    "contrib.sync_batchnorm.SyncBatchNorm": (
        "num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True"
    ),
    "data_parallel.DistributedDataParallel": DDP,
    "data_parallel.distributed.DistributedDataParallel_V1_9_0": DDP,
    "data_parallel.distributed.DistributedDataParallel_V1_9_0.no_sync": "",
    "data_parallel.distributed.DistributedDataParallel_V1_9_0.join": (
        "divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False"
    ),
    "data_parallel.distributed.DistributedDataParallel_V1_9_0.register_comm_hook": "state, hook",
    "data_parallel.distributed.DistributedDataParallel_V1_9_0.will_sync_module_buffers": "",
    "data_parallel.distributed.DistributedDataParallel_V1_9_0.bagua_build_params": "",
    "data_parallel.distributed.to_bagua_process_group": "process_group=None",
    "data_parallel.functional.torch_reduce_op_to_bagua": "op",
    "contrib.cache_loader.CacheLoader": "backend='redis', dataset_name='', writer_buffer_size=1, **kwargs",
    "contrib.cache_loader.CacheLoader.get": "key, load_fn",
    "contrib.cache_loader.CacheLoader.num_keys": "",
    "contrib.cached_dataset.CachedDataset": "dataset, backend, dataset_name, writer_buffer_size=20, **kwargs",
    "contrib.utils.redis_store.RedisStore": "hosts=None, cluster_mode=True, capacity_per_node=107374182400",
    "contrib.utils.store.ClusterStore": "stores",
    "contrib.utils.store.ClusterStore.route": "key",
    "contrib.utils.store.Store.set": "key, value",
    "contrib.utils.store.Store.get": "key",
    "contrib.utils.store.Store.mset": "dictionary",
    "contrib.utils.store.Store.mget": "keys",
    "contrib.utils.store.Store.num_keys": "",
    "contrib.utils.store.Store.clear": "",
    "contrib.utils.store.Store.status": "",
    "contrib.utils.store.Store.shutdown": "",
    "env.find_free_network_port": "",
    "utils.apply_flattened_call": "bucket, call, extra_args=None",
    "utils.apply_flattened_call_all": "tensors, call",
    "utils.check_contiguous": "tensors",
    "utils.get_flattened_tensor": "tensors",
    "utils.to_bagua_datatype": "datatype",
    "utils.average_by_removing_extreme_values": "raw_score_list",
    "utils.StatisticalAverage": "last_update_time=..., records=[], record_tail=(0.0, 0.0)",
    "utils.StatisticalAverage.record_seconds": "",
    "utils.StatisticalAverage.total_recording_time": "",
    "utils.StatisticalAverage.get_records_mean": "last_n_seconds",
    "utils.StatisticalAverage.record": "val",
    "utils.StatisticalAverage.get": "last_n_seconds",
    "data_parallel.functional.all_reduce": f"tensor, {SUM}, group=...",
    "data_parallel.bagua_distributed.BaguaDistributedDataParallel": (
        "module, optimizers, algorithm, process_group, bagua_module_name=None, gradient_as_bucket_view=True, "
        "find_unused_parameters=False"
    ),
    "data_parallel.bagua_distributed.BaguaDistributedDataParallel.bagua_build_params": "",
    "algorithms.Algorithm.reify": "process_group",
    "algorithms.Algorithm.init": "name, **kwargs",
    "algorithms.AlgorithmImpl": "process_group",
    "algorithms.AlgorithmImpl.need_reset": "",
    "algorithms.AlgorithmImpl.init_tensors": "bagua_ddp",
    "algorithms.AlgorithmImpl.tensors_to_buckets": "tensors, do_flatten",
    "algorithms.AlgorithmImpl.init_forward_pre_hook": "bagua_ddp",
    "algorithms.AlgorithmImpl.init_backward_hook": "bagua_ddp",
    "algorithms.AlgorithmImpl.init_post_backward_hook": "bagua_ddp",
    "algorithms.AlgorithmImpl.init_post_optimizer_step_hook": "bagua_ddp",
    "algorithms.AlgorithmImpl.init_operations": "bagua_ddp, bucket",
    "algorithms.GlobalAlgorithmRegistry.register": "name, algorithm, description=None",
    "algorithms.GlobalAlgorithmRegistry.get": "name",
    "algorithms.GlobalAlgorithmRegistry.available_algorithms": "",
    "algorithms.gradient_allreduce.GradientAllReduceAlgorithm": "hierarchical=False, average=True",
    "algorithms.async_model_average.AsyncModelAverageAlgorithm": (
        "peer_selection_mode='all', sync_interval_ms=500, warmup_steps=0"
    ),
    "algorithms.async_model_average.AsyncModelAverageAlgorithmImpl.abort": "model",
    "algorithms.async_model_average.AsyncModelAverageAlgorithmImpl.resume": "model",
    "bucket.BaguaBucket.append_asynchronous_model_average_op": "peer_selection_mode",
    "algorithms.bytegrad.ByteGradAlgorithm": "hierarchical=True, average=True",
    "algorithms.decentralized.DecentralizedAlgorithm": (
        "hierarchical=True, peer_selection_mode='all', communication_interval=1"
    ),
    "algorithms.decentralized.LowPrecisionDecentralizedAlgorithm": "hierarchical=True, communication_interval=1",
    "algorithms.q_adam.QAdamAlgorithm": "q_adam_optimizer, hierarchical=True",
    "algorithms.q_adam.QAdamOptimizer": (
        "params, lr=1e-3, warmup_steps=100, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0"
    ),
}

ATTRIBUTES: dict[str, set[str]] = {
    "BaguaModule": {
        *("bagua_module_name", "bagua_algorithm", "bagua_optimizers", "bagua_buckets"),
        *("parameters_to_ignore", "bagua_train_step_counter"),
    },
    "BaguaTensor": {"bagua_tensor_name", "bagua_module_name"},
    "communication.BaguaCommunicator": {"cuda_stream"},
    "communication.CommMember": {"WORLD", "NON_COMM_MEMBER"},
    "communication.comm": {"WORLD"},
    "data_parallel.distributed.DistributedDataParallel_V1_9_0": {
        *("require_backward_grad_sync", "parameters_to_ignore", "bagua_module_name", "bagua_algorithm"),
        *("bagua_optimizers", "bagua_buckets", "bagua_train_step_counter"),
    },
}
