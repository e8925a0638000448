"""Pipeline parallelism: runs micro-batches through the stages of all ranks of `pp`. The files, in the order of use:

| file          | step                                                                                               |
| ------------- | -------------------------------------------------------------------------------------------------- |
| `stage.py`    | partition the model into stages; each rank keeps its own                                           |
| `runner.py`   | run this rank's actions (forward, backward, input or weight gradient), and record when each ran      |
| `messages.py` | send activations and their gradients to the ranks of other stages, receive them from there         |
| `tied.py`     | once a step: sum the gradients of parameters that several stages hold                              |

The lists come from `shardwright.schedule`; `parallel/data.py` reduces gradients over data ranks.
"""
