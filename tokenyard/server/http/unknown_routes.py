"""What is said at paths where there is nothing: whether it is a known API that is not offered, and what is."""

NOT_OFFERED: tuple[tuple[str, str], ...] = (
    ("/v1/classify", "classification, as the model that is served generates text"),
    ("/classify", "classification, as the model that is served generates text"),
    ("/v1/audio", "audio"),
    ("/v1/images", "images"),
    ("/v1/moderations", "moderation"),
    ("/v1/files", "files; `tokenyard generate --input` answers many requests at once"),
    ("/v1/batches", "batches; `tokenyard generate --input` answers many requests at once"),
    ("/v1/assistants", "assistants, as it keeps nothing between requests"),
    ("/v1/threads", "threads, as it keeps nothing between requests"),
    ("/v1/responses/", "anything else of responses than getting and deleting them: none runs in the background"),
    ("/v1/conversations", "conversations; previous_response_id goes on from a response that is kept"),
    ("/v1/fine_tuning", "training"),
    ("/api/embeddings", "Ollama's old form of embeddings; /api/embed and /v1/embeddings give them"),
    ("/api/pull", "fetching models: it serves the one that it was started with"),
    ("/api/push", "sending models away: it serves the one that it was started with"),
    ("/api/create", "making models: it serves the one that it was started with"),
    ("/api/copy", "copying models: it serves the one that it was started with"),
    ("/api/delete", "deleting models: it serves the one that it was started with"),
    ("/api/blobs", "storing models: it serves the one that it was started with"),
)
GENERATING = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /generate, /api/chat and /api/generate"
)


def nothing_at(method: str, path: str) -> str:
    """What to say to a request for a path that there is none of."""
    for prefix, what in NOT_OFFERED:
        if path.startswith(prefix):
            return f"{method} {path}: this server does not offer {what}. Text is generated at {GENERATING}"
    return f"there is nothing at this path: {method} {path}. Text is generated at {GENERATING}; /docs lists all paths"
