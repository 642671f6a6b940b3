"""SGLang's `/generate`, and the routes for operators: control, requests, adapters, policy."""
