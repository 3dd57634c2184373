from vllm.models.kimi_k3.cpu import use_portable_classes

_ON_CPU = use_portable_classes(globals())
