"""Units that people compare runs by: TFLOP/s and MFU per GPU, tokens per second per GPU."""

from __future__ import annotations

from megatron_lynx.estimate import padded_vocabulary
from megatron_lynx.job import Job
from megatron_lynx.spec import Batch, Model, Parallel


def model_flops(model: Model, parallel: Parallel, batch: Batch) -> int:
    """FLOPs of a step that the model needs: forward and twice that backward, nothing recomputed.

    As Megatron counts them (``num_floating_point_operations``): every matrix product with a weight, the
    padded output layer, and half of attention's two products, since its mask is causal.
    """
    h, inner = model.hidden_size, model.num_attention_heads * model.head_size
    projections = h * (inner + 2 * model.groups * model.head_size) + inner * h
    layer = projections + h * model.ffn * (3 if model.swiglu else 2)
    attention = batch.seq_length * inner
    predictions = model.mtp_num_layers
    matrices = (model.num_layers + predictions) * (layer + attention) + predictions * 2 * h * h
    matrices += (1 + predictions) * h * padded_vocabulary(model, parallel)
    return 3 * 2 * matrices * batch.global_batch_size * batch.seq_length


def gpus(job: Job) -> int:
    """Devices of a job."""
    return job.parallel.tp * job.parallel.pp * job.parallel.dp * job.parallel.cp


def tflops_per_gpu(job: Job, iteration_ns: int) -> float:
    """Model TFLOP/s that each device reaches with a step of so many nanoseconds."""
    return model_flops(job.model, job.parallel, job.batch) / (iteration_ns * 1e3 * gpus(job))


def mfu(job: Job, iteration_ns: int) -> float | None:
    """Model FLOPs utilisation, of the device's peak; None where the device is not known."""
    if job.cluster is None:
        return None
    peak = job.cluster.device.flops_per_second / 1e12
    return tflops_per_gpu(job, iteration_ns) / peak
