"""Settings that workers read: models, optimizers, FSDP, actor, reference, rollout, critic, reward
model.

Every default of these keys is written here and nowhere else: a value, or with `Follows` the key
whose value it takes. A field with neither must come from the user (a model path). The text under a
field is its documentation: it says what the key means, its unit and its allowed values, and it
becomes docs/config.md. This package imports neither torch, ray nor vllm, so that keys and values
are checked before any of them is loaded.
"""
