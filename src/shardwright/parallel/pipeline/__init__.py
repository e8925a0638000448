"""Pipeline parallelism: the path of a micro-batch through the stages of all ranks of `pp`, from top to bottom:

| file          | step                                                                                               |
| ------------- | -------------------------------------------------------------------------------------------------- |
| `stage.py`    | cut the model into stages; each rank keeps its own                                                 |
| `runner.py`   | run this rank's list of actions: forward, backward, input gradient, weight gradient                |
| `messages.py` | send what a stage has computed to the rank of the next stage, receive what this rank needs         |
| `tied.py`     | once a step: sum the gradients of parameters that several stages hold                              |
| `timeline.py` | when each action ran                                                                               |

The lists come from `shardwright.schedule`, when gradients are reduced over data ranks is in `parallel/data.py`.
"""
