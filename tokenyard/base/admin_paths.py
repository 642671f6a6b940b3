"""Paths that control an engine or reach requests of all clients: the admin key opens them, a client's does not."""

ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/clear_hicache_storage_backend",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/get_server_info",
        "/server_info",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/get_weights_by_name",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/pause",
        "/resume",
        "/v1/scheduler",
        "/v1/live",
    }
)
ADMIN_PREFIX = "/v1/requests/"
"""Paths that read or change a request by its id. They reach the requests of all clients."""


def is_admin_path(path: str) -> bool:
    """Whether a path controls the engine or reaches requests of all clients."""
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)
