"""Plans of one rank and of two whose memory leaves and comes back, on a CPU and on CUDA."""

from __future__ import annotations

GROUPS = {
    "use": "core.adamw",
    "lr": 3e-3,
    "clip_norm": 0.5,
    "groups": [{"match": "blocks.0.*", "lr": 1e-3, "weight_decay": 0.1}, {"match": "embed.*", "freeze": True}],
}

ALONE = {
    "fp32": {"precision__compute": "fp32"},
    "bf16 with masters": {"precision__compute": "bf16"},
    "two groups and a frozen weight": {"precision__compute": "bf16", "optimizer": GROUPS},
    "four micro-batches": {"precision__compute": "bf16", "batch__micro_size": 2},
    "a tied weight": {"precision__compute": "bf16", "model__tie_embeddings": True},
    "an optimizer by factory": {"optimizer": {"factory": "torch.optim:NAdam", "lr": 3e-3}},
}

LAYOUTS = {
    "interleaved pipeline": {"model__num_layers": 2, "parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved", "chunks": 2}},
    "sharded weights": {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
    "buckets": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.004}]},
    "sharded optimizer": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.002}]},
    "low-rank gradients": {
        "parallel": {"dp": 2},
        "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1, "start_step": 2}],
    },
}


def assert_same(plain, *others):
    for name, other in zip(("away between steps", "stepped in buckets"), others, strict=True):
        assert other[:2] == plain[:2], name
        assert other[2] > 0, f"{name}: nothing was moved"
