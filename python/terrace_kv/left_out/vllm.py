"""Fields of vLLM's configuration that are not part of the namespace, and why.

All others are: see ``terrace_kv/configuration.py``. ``docs/engine-namespaces.md`` has the table of all fields, which
``tests/engines/fields.py`` writes and tests compare with this list and with the installed vLLM.
"""

from __future__ import annotations

_NAMED = "named by the content of the weights instead"
_PROCESS = "identifies a process or a machine"
_MEMORY = "how much fits, not what it is"
_BATCH = "which tokens are computed together, which also differs from request to request"
_COUNTED = "counted or collected while the engine starts and runs"
_TOLD = "what the engine reports of itself"
_OUTPUT = "applied to the model's output"
_INPUT = "applied to text; blocks are named by tokens"
_FILES = "how and where files are read and written, not which"

LEFT_OUT: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "instance_id": _PROCESS,
        "kv_transfer_config": "the connector itself; what matters of it is in the layout",
        "kv_events_config": _TOLD,
        "ec_transfer_config": "where encoder outputs come from; they are named by their content",
        "quant_config": "read from the model's configuration and files, which are in the namespace",
        "observability_config": _TOLD,
        "logging_config": _TOLD,
        "profiler_config": _TOLD,
        "watchdog_config": _TOLD,
        "shutdown_timeout": "only the end of the engine",
        "structured_outputs_config": _OUTPUT,
        "reasoning_config": _OUTPUT,
    },
    "ModelConfig": {
        "model": _NAMED,
        "model_weights": _NAMED,
        "revision": _NAMED,
        "tokenizer": _INPUT,
        "tokenizer_mode": _INPUT,
        "tokenizer_revision": _INPUT,
        "skip_tokenizer_init": _INPUT,
        "served_model_name": _TOLD,
        "hf_token": "a secret of whoever downloads",
        "generation_config": _OUTPUT,
        "override_generation_config": _OUTPUT,
        "logits_processors": _OUTPUT,
        "max_logprobs": _OUTPUT,
        "logprobs_mode": _OUTPUT,
    },
    "SpeculativeConfig": {
        "model": _NAMED,
        "revision": _NAMED,
    },
    "CacheConfig": {
        "gpu_memory_utilization": _MEMORY,
        "num_gpu_blocks_override": _MEMORY,
        "num_gpu_blocks": _MEMORY,
        "num_cpu_blocks": _MEMORY,
        "simple_cpu_offload_num_blocks": _MEMORY,
        "kv_cache_size_tokens": _MEMORY,
        "kv_cache_max_concurrency": _MEMORY,
        "kv_cache_memory_bytes": _MEMORY,
        "kv_offloading_size": _MEMORY,
    },
    "ParallelConfig": {
        "rank": _PROCESS,
        "node_rank": _PROCESS,
        "data_parallel_rank": _PROCESS,
        "data_parallel_rank_local": _PROCESS,
        "data_parallel_index": _PROCESS,
        "data_parallel_size_local": _PROCESS,
        "data_parallel_master_ip": _PROCESS,
        "data_parallel_rpc_port": _PROCESS,
        "data_parallel_master_port": _PROCESS,
        "_data_parallel_master_port_list": _PROCESS,
        "_coord_store_port": _PROCESS,
        "_api_process_count": _PROCESS,
        "_api_process_rank": _PROCESS,
        "master_addr": _PROCESS,
        "master_port": _PROCESS,
        "assigned_physical_gpu_ids": _PROCESS,
        "numa_bind": _PROCESS,
        "numa_bind_nodes": _PROCESS,
        "numa_bind_cpus": _PROCESS,
        "placement_group": _PROCESS,
        "ray_runtime_env": _PROCESS,
        "distributed_timeout_seconds": "how long processes wait for each other",
        "cpu_distributed_timeout_seconds": "how long processes wait for each other",
        "max_parallel_loading_workers": _FILES,
    },
    "SchedulerConfig": {
        "max_num_batched_tokens": _BATCH,
        "max_num_scheduled_tokens": _BATCH,
        "max_num_seqs": _BATCH,
        "max_num_active_seqs": _BATCH,
        "max_num_queued_reqs": _BATCH,
        "max_num_queued_tokens": _BATCH,
        "max_num_encoder_input_tokens": _BATCH,
        "encoder_cache_size": _MEMORY,
        "long_prefill_token_threshold": _BATCH,
        "long_prefill_token_threshold_adaptive": _BATCH,
        "policy": _BATCH,
        "prefill_schedule_interval": _BATCH,
        "watermark": _BATCH,
        "stream_interval": _OUTPUT,
    },
    "CompilationConfig": {
        "cudagraph_capture_sizes": _BATCH,
        "max_cudagraph_capture_size": _BATCH,
        "compile_ranges_endpoints": _BATCH,
        "debug_dump_path": _FILES,
        "cache_dir": _FILES,
        "local_cache_dir": _FILES,
        "enabled_custom_ops": _COUNTED,
        "disabled_custom_ops": _COUNTED,
        "traced_files": _COUNTED,
        "compilation_time": _COUNTED,
        "encoder_compilation_time": _COUNTED,
        "static_forward_context": _COUNTED,
        "static_all_moe_layers": _COUNTED,
    },
    "LoadConfig": {
        "download_dir": _FILES,
        "use_tqdm_on_load": _TOLD,
        "safetensors_prefetch_num_threads": _FILES,
        "safetensors_prefetch_block_size": _FILES,
    },
}

_ANY_RANKS = "vLLM certifies each layer's bytes for any number of ranks"
# In addition, if vLLM certifies its canonical layout.
FOR_ANY_RANKS: dict[str, dict[str, str]] = {
    "VllmConfig": {"parallel_config": _ANY_RANKS},
    # The choice of fusions depends on the number of ranks.
    "CompilationConfig": {"pass_config": _ANY_RANKS},
}

# Environment variables whose names match.
ENVIRONMENT: dict[str, str] = {
    "VLLM_*_PORT": _PROCESS,
    "VLLM_PORT": _PROCESS,
    "VLLM_*_HOST": _PROCESS,
    "VLLM_*_IP": _PROCESS,
    "VLLM_DP_RANK*": _PROCESS,
    "VLLM_RAY_*": _PROCESS,
    "VLLM_RPC_BASE_PATH": _PROCESS,
    "VLLM_DIST_IDENT": _PROCESS,
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": _PROCESS,
    "VLLM_CPU_OMP_THREADS_BIND": _PROCESS,
    "VLLM_CPU_KVCACHE_SPACE": _MEMORY,
    "VLLM_ENABLE_V1_MULTIPROCESSING": _PROCESS,
    "VLLM_WORKER_MULTIPROC_METHOD": _PROCESS,
    "VLLM_API_KEY": "a secret of users",
    "VLLM_LOG*": _TOLD,
    "VLLM_NO_USAGE_STATS": _TOLD,
    "VLLM_DO_NOT_TRACK": _TOLD,
    "VLLM_USAGE_*": _TOLD,
    "VLLM_CACHE_ROOT": _FILES,
    "VLLM_CONFIG_ROOT": _FILES,
}
