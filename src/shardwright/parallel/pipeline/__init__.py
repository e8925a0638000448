"""Pipeline parallelism: runs micro-batches through the stages of all ranks of `pp`. The files, in the order of use:

| file          | step                                                                                               |
| ------------- | -------------------------------------------------------------------------------------------------- |
| `stage.py`    | partition the model into stages; each rank keeps its own                                           |
| `runner.py`   | run this rank's list of actions: forward, backward, input gradient, weight gradient                |
| `messages.py` | send activations and their gradients to the ranks of other stages, receive them from there         |
| `tied.py`     | once a step: sum the gradients of parameters that several stages hold                              |
| `timeline.py` | record when each action ran                                                                        |

The lists come from `shardwright.schedule`; `parallel/data.py` reduces gradients over data ranks.
"""
