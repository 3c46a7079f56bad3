"""The tests that run on GPUs as well (tests/gpu/test_training_core.py), by file: of tests/distributed unless a folder
is named.

Selected: tests whose result depends on CUDA or NCCL:

- the weights of torch's DDP or of the algorithm's formula, bit for bit: one case for each algorithm and way to wrap;
- streams: overlap, hooks that do not wait, exchanges under way while forward and backward run, the averaging thread;
- compression by the kernels for GPUs, with overflow, short dtypes and values that are not finite;
- NCCL's groups: made again, of some ranks, between and within emulated nodes, coalesced;
- autocast, GradScaler, optimizers with kernels of their own, checkpointing, torch.compile;
- batch normalization over the ranks, by kernels of its own;
- state and resumption; errors that have to be raised and must not hang.

Of a parametrized family one or two members stand for all. Not chosen are arguments, names, attributes and messages that
Python alone decides, what is skipped on CUDA, and the schedules of test_async_schedules.py. A test costs 4 to 15 s
on GPUs, mostly for processes and communicators that start: one that is added should be worth that.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHIFT_ONE = "decentralized peer_selection_mode=shift_one hierarchical=False"

CHOICE: dict[str, Sequence[str]] = {
    "abandoned_models": ["test_a_group_is_destroyed_when_all_ranks_have_lost_it"],
    "gradient_allreduce": [
        "test_two_ranks_have_the_weights_of_torch_ddp[with_bagua-adamw]",
        "test_two_ranks_have_the_weights_of_torch_ddp[wrapper-momentum]",
        "test_unusual_parameters_have_the_weights_of_torch_ddp[wrapper-channels_last]",
        "test_unusual_parameters_have_the_weights_of_torch_ddp[wrapper without views-mixed]",
        "test_more_ranks_agree_with_each_other_and_torch_ddp[4-with_bagua]",
        "test_only_one_rank_of_a_node_talks_to_other_nodes[two nodes of two]",
    ],
    "wrapper": [
        "test_device_ids_move_the_inputs",
        "test_buffers_that_change_before_the_first_forward_pass",
    ],
    # The digest of a message is read one forward pass later.
    "buffer_changes": [
        "test_changed_buffers_are_broadcast",
        "test_ranks_with_other_buffers_are_told_which[length]",
    ],
    "copies": ["test_one_rank_alone_may_copy_a_wrapper"],
    "own_business": [
        "test_a_rank_may_differentiate_alone",
        "test_what_one_rank_does_before_its_backward_pass[wrapper finding unused]",
    ],
    "gradient_graphs": ["test_the_graph_of_what_was_communicated_is_refused[wrapper]"],
    "bagua_module": ["test_the_group_is_destroyed_and_made_again"],
    "find_unused": [
        "test_a_missing_gradient_is_named_where_it_is_missing[with_bagua-True]",
    ],
    "interrupted_passes": [],
    "no_sync": [],
    "step_programs": ["test_gradients[2 ranks]", "test_weights[2 ranks]", "test_wrapper[2 ranks]"],
    "join": ["test_two_ranks_end_where_torch_ddp_does[NormNet-counts0]"],
    "contrib/fused_training": ["test_every_layout_trains_alike"],
    "overlap": ["test_buckets_are_launched_between_gradients[with_bagua-False]"],
    "torch_features": [
        "test_autocast_and_gradient_scaling[wrapper]",
        "test_buffers_follow_the_first_rank[NormNet]",
    ],
    "communicator_methods": ["test_each_collective"],
    # Copies of states in the background, while training changes them.
    "contrib/checkpoint": ["test_each_algorithm_goes_on_bit_for_bit[with_bagua]"],
    # All-to-all on autograd's thread; experts that are computed together.
    "contrib/moe": [
        "test_outputs_and_gradients_are_those_of_one_process[experts2-2]",
        "test_training[2-None-dtype2-8]",
    ],
    "checkpoint_and_compile": [
        "test_checkpointed_blocks[Reentrant-with_bagua-True]",
        "test_compiled[places0]",
    ],
    "collectives": ["test_source_and_destination_may_share_memory"],
    "collectives_drawn": [
        "test_broadcast[2 ranks]",
        "test_send_and_recv[2 ranks]",
        "test_gather_inplace[2 ranks]",
        "test_scatter_inplace[2 ranks]",
        "test_alltoall[2 ranks]",
        "test_alltoall_v[1 to 3 of 4]",
    ],
    # NCCL computes no bitwise reductions, and torch does not say so: not with the bits of torch.
    "reductions_drawn": [
        "test_allreduce[2 ranks]",
        "test_reduce[2 ranks]",
        "test_reduce_scatter[1 to 3 of 4]",
        "test_broadcast_coalesced[2 ranks]",
        "test_allreduce_coalesced_inplace[2 ranks]",
    ],
    "contrib/sync_batchnorm": [
        "test_ranks_compute_what_one_large_batch_does",
        "test_data_parallel_training_is_that_of_one_process[2-with_bagua]",
        "test_evaluation_and_inputs_without_gradient_do_not_communicate",
        "test_survivors_name_the_rank_that_died[backward]",
    ],
    "state_broadcast": ["test_tensors_that_fit_are_overwritten_in_place"],
    "process_groups": [
        "test_communicators_of_nodes[sizes0-None-expected0]",
        "test_the_same_members_again_after_a_group_was_destroyed",
    ],
    "rank_failure": ["test_survivors_name_the_rank_that_died[with_bagua-backward]"],
    "buckets": ["test_operations_on_other_dtypes[scattergather-dtype1]"],
    "powersgd": [
        "test_steps_are_those_of_torchs_hook",
        "test_a_mean_of_low_rank_is_exact_and_an_overflow_is_forgotten",
    ],
    "bytegrad": [
        "test_weights_are_those_of_the_formula_on_one_node[2]",
        "test_weights_are_those_of_the_formula_on_two_nodes[two nodes of two-wrapper]",
    ],
    "chunk_exchange": ["test_every_chunk_arrives[collectives-2]"],
    "comm_hooks": [
        "test_gradients_are_those_of_the_formula_on_one_node[2]",
        "test_gradients_are_those_of_the_formula_on_two_nodes[two nodes of two]",
        "test_hooks_do_not_wait_for_the_communication[None-bytegrad]",
        "test_unused_parameters_and_two_models_by_turns",
        "test_nothing_is_left_of_a_group_that_was_destroyed",
    ],
    # Streams of FSDP, kernels in between, PREMUL_SUM, gathers that are waited for later.
    "fsdp_collectives": ["test_a_reduce_scatter_is_the_sum_of_what_the_codec_makes[2]"],
    "fsdp_training": [
        "test_compressed[2-codecs]",
        "test_compressed[2-mixed precision]",
        "test_compressed[2-divide factor]",
        "test_compressed[2-prefetched]",
    ],
    "fsdp_handle": ["test_training_resumes_bit_for_bit"],
    "fsdp_replicas": ["test_hybrid_sharding[_native_settings]", "test_hybrid_sharding[_group_of_replicas]"],
    "fsdp_waits": ["test_waits_are_measured[_measured]"],
    "fsdp_settings": ["test_settings_of_fsdp[_setters]"],
    "shared_weights": ["test_weights_keep_their_memory[decentralized]"],
    "decentralized": [
        "test_weights_lie_in_reverse_order_as_in_bagua_0_9",
        "test_rounds_that_go_wrong[all]",
        "test_other_communication_does_not_get_in_between",
    ],
    "weight_exchanges": [
        "test_weights_are_those_of_the_loops[two ranks]",
        "test_weights_are_those_of_the_loops[two nodes of two]",
    ],
    "low_precision_decentralized": ["test_weights_that_are_not_finite_are_seen"],
    "qadam": ["test_steps_follow_the_formula[with_bagua-2]"],
    "qadam_optimizer": ["test_steps_follow_the_formula_before_and_after_warm_up[torch.bfloat16]"],
    "qadam_features": [
        "test_a_gradient_scaler_that_the_algorithm_knows[True]",
    ],
    "algorithms_compose": [
        "test_accumulation_clipping_evaluation_freezing_and_autocast[bytegrad]",
        "test_accumulation_clipping_evaluation_freezing_and_autocast[async sync_interval_ms=1]",
        "test_a_gradient_scaler_and_an_overflow_on_one_rank[qadam]",
        "test_a_gradient_scaler_and_an_overflow_on_one_rank[bytegrad]",
        "test_emulated_nodes[low_precision_decentralized-3 ranks]",
        "test_process_groups",
        "test_switching_through_all_algorithms[wrapper]",
        "test_several_models_with_different_algorithms",
    ],
    "algorithms_resume": [
        "test_fresh_objects_go_on_from_any_step[decentralized]",
        "test_fresh_objects_go_on_from_any_step[low_precision_decentralized]",
        f"test_other_processes_go_on[{_SHIFT_ONE}]",
    ],
    # Exchanges that outlast steps, on a stream of their own, and a round's check that the host does not wait for.
    "local_steps": ["test_differences_are_compressed_by_any_codec"],
    "local_steps_warm_up": ["test_a_warm_up_is_what_two_wrappings_are[streaming_diloco]"],
    "sharded_replicas": ["test_two_replicas_of_two_shards"],
    "async_warmup": ["test_the_warm_up_is_gradient_all_reduce_bit_for_bit[with_bagua-momentum]"],
    "async_model_average": [
        "test_an_average_moves_replicas_to_their_mean_and_not_the_mean[2-MixedDtypes]",
        "test_ranks_at_different_paces[2]",
        "test_another_algorithm_takes_over",
    ],
    "async_ends": [
        "test_a_module_that_is_dropped_ends_its_loop[trains0]",
        "test_survivors_name_the_rank_that_died",
    ],
    "async_schedules": [],
}


def file_of(topic: str) -> str:
    folder, _, name = topic.rpartition("/")
    return f"tests/{folder or 'distributed'}/test_{name}.py"


def chosen_tests() -> list[str]:
    """Node ids."""
    return [f"{file_of(topic)}::{test}" for topic, tests in CHOICE.items() for test in tests]


def all_files() -> list[str]:
    """Also those of which nothing is chosen."""
    return [file_of(topic) for topic in CHOICE]
