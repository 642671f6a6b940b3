"""SGLang's `/generate` and `/v1/score`, and routes for operators: control, requests, adapters, policy, live feed."""
