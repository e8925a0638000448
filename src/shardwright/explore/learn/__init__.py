"""Pages that explain each system of distributed training with the numbers of the current plan; no torch."""

from shardwright.explore.learn.page import learn_page as learn_page
from shardwright.explore.learn.site import write_static as write_static
from shardwright.explore.learn.topics import TOPICS as TOPICS
