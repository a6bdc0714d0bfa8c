"""Arguments of SGLang's server that are not part of the namespace, and why.

All others are: see ``terrace_kv/configuration.py``. ``docs/engine-namespaces.md`` has the table of all arguments, which
``tests/engines/fields.py`` writes and tests compare with this list and with the installed SGLang.
"""

from __future__ import annotations

_NAMED = "named by the content of the weights instead"
_PROCESS = "identifies a process or a machine"
_MEMORY = "how much fits, not what it is"
_BATCH = "which tokens are computed together, which also differs from request to request"
_TOLD = "what the server reports of itself"
_OUTPUT = "applied to the model's output"
_INPUT = "applied to text; pages are named by tokens"
_FILES = "how and where files are read and written, not which"
_STORE = "the storage backend itself: where pages are, and when they are read"
_PART = "which part of a request's tokens a server computes"
_SECRET = "a secret of users"

LEFT_OUT: dict[str, str] = {
    "model_path": _NAMED,
    "revision": _NAMED,
    "weight_version": "in the names of pages, because it changes while the server runs",
    "download_dir": _FILES,
    "weight_loader_prefetch_num_threads": _FILES,
    "weight_cache_socket": _PROCESS,
    "weight_cache_timeout": _PROCESS,
    "engine_info_bootstrap_port": _PROCESS,
    "tokenizer_path": _INPUT,
    "tokenizer_mode": _INPUT,
    "tokenizer_backend": _INPUT,
    "tokenizer_worker_num": _INPUT,
    "detokenizer_worker_num": _OUTPUT,
    "skip_tokenizer_init": _INPUT,
    "chat_template": _INPUT,
    "hf_chat_template_name": _INPUT,
    "completion_template": _INPUT,
    "default_chat_template_kwargs": _INPUT,
    "reasoning_parser": _OUTPUT,
    "tool_call_parser": _OUTPUT,
    "grammar_backend": _OUTPUT,
    "sampling_defaults": _OUTPUT,
    "preferred_sampling_params": _OUTPUT,
    "stream_interval": _OUTPUT,
    "random_seed": "drawn when the server starts; only samples depend on it",
    "served_model_name": _TOLD,
    "host": _PROCESS,
    "port": _PROCESS,
    "fastapi_root_path": _PROCESS,
    "grpc_port": _PROCESS,
    "ssl_keyfile": _SECRET,
    "ssl_certfile": _SECRET,
    "ssl_ca_certs": _SECRET,
    "ssl_keyfile_password": _SECRET,
    "api_key": _SECRET,
    "admin_api_key": _SECRET,
    "file_storage_path": _FILES,
    "nccl_port": _PROCESS,
    "dist_init_addr": _PROCESS,
    "dist_timeout": _PROCESS,
    "gated_launch_port": _PROCESS,
    "node_rank": _PROCESS,
    "base_gpu_id": _PROCESS,
    "gpu_id_step": _PROCESS,
    "numa_node": _PROCESS,
    "watchdog_timeout": _PROCESS,
    "soft_watchdog_timeout": _PROCESS,
    "load_balance_method": _BATCH,
    "mem_fraction_static": _MEMORY,
    "max_total_tokens": _MEMORY,
    "max_running_requests": _BATCH,
    "max_queued_requests": _BATCH,
    "chunked_prefill_size": _BATCH,
    "max_prefill_tokens": _BATCH,
    "prefill_max_requests": _BATCH,
    "schedule_policy": _BATCH,
    "schedule_conservativeness": _BATCH,
    "num_continuous_decode_steps": _BATCH,
    "cuda_graph_config": _BATCH,
    "cuda_graph_max_bs_decode": _BATCH,
    "cuda_graph_max_bs_prefill": _BATCH,
    "cuda_graph_max_seq_len_prefill": _BATCH,
    "cuda_graph_bs_decode": _BATCH,
    "cuda_graph_bs_prefill": _BATCH,
    "torch_compile_max_bs": _BATCH,
    "max_mamba_cache_size": _MEMORY,
    "radix_eviction_policy": _MEMORY,
    "_radix_eviction_policy_explicitly_set": _MEMORY,
    "radix_eviction_policy_config": _MEMORY,
    "hicache_ratio": _MEMORY,
    "hicache_size": _MEMORY,
    "hicache_host_memory_fraction": _MEMORY,
    "hicache_write_policy": _STORE,
    "hicache_storage_prefetch_policy": _STORE,
    "hicache_storage_backend_extra_config": _STORE,
    "hicache_storage_prefetch_retry_poll_interval": _STORE,
    "hicache_storage_prefetch_retry_max_attempts": _STORE,
    "log_level": _TOLD,
    "log_level_http": _TOLD,
    "log_requests": _TOLD,
    "log_requests_level": _TOLD,
    "crash_dump_folder": _TOLD,
    "enable_metrics": _TOLD,
    "extra_metric_labels": _TOLD,
    "smg_http_sidecar_port": _PROCESS,
    "kv_events_config": _TOLD,
    "load_publish_endpoint": _PROCESS,
    "forward_pass_metrics_worker_id": _PROCESS,
    "forward_pass_metrics_ipc_name": _PROCESS,
    "otlp_traces_endpoint": _TOLD,
    "otlp_service_name": _TOLD,
    "export_metrics_to_file_dir": _TOLD,
    "disaggregation_mode": _PART,
    "disaggregation_transfer_backend": _PART,
    "disaggregation_bootstrap_port": _PROCESS,
    "disaggregation_ib_device": _PROCESS,
    "disaggregation_decode_enable_radix_cache": _PART,
    "disaggregation_decode_enable_offload_kvcache": _PART,
    "num_reserved_decode_tokens": _PART,
    "mooncake_ib_device": _PROCESS,
    "encoder_urls": _PROCESS,
    "encoder_bootstrap_port": _PROCESS,
    "encoder_register_urls": _PROCESS,
    "decoupled_spec_bind_endpoint": _PROCESS,
    "decoupled_spec_connect_endpoints": _PROCESS,
    "decoupled_spec_rank": _PROCESS,
}

_SAME = "such pools are the same on all ranks, whatever their number"
# In addition, for pools that are the same on all ranks.
FOR_ANY_RANKS: dict[str, str] = dict.fromkeys(
    ("tp_size", "dp_size", "attn_dp_size", "ep_size", "moe_dp_size", "moe_dense_tp_size", "shared_experts_tp_size", "nnodes"),
    _SAME,
)

# Environment variables whose names match.
ENVIRONMENT: dict[str, str] = {
    "SGLANG_*_PORT": _PROCESS,
    "SGLANG_*_HOST": _PROCESS,
    "SGLANG_*_IP": _PROCESS,
    "SGLANG_*_DIR": _FILES,
    "SGLANG_TEST_*": "faults and delays of tests",
    "SGLANG_LOG*": _TOLD,
    "SGLANG_RUN_ID": _PROCESS,
}
