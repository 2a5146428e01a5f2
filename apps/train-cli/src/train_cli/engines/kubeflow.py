"""A TrainJob of the Kubeflow Trainer, which starts torchrun in one pod per host and tells it where the others are."""

from __future__ import annotations

import json

from train_cli.engines.job import Job

RUNTIME = "torch-distributed"
"""The runtime for torch that the Trainer installs in a cluster: it sets torchrun's options as variables, such as PET_NNODES."""


def render(job: Job, image: str) -> str:
    """Returns a manifest for `kubectl create -f -`. image: has Sley's packages, the plan and its files."""
    resources = (
        f'\n    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: "{job.per_node}"' if job.uses_gpus else ""
    )
    command = json.dumps(["torchrun", "-m", "train_cli", *job.arguments])  # JSON is YAML
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.label}
spec:
  runtimeRef:
    name: {RUNTIME}
  trainer:
    image: {json.dumps(image)}
    numNodes: {job.nodes}
    numProcPerNode: {job.per_node}
    command: {command}{resources}
"""
