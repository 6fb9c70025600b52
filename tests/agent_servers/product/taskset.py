"""The taskset that `vf-init product --add-tool` scaffolds, with its reward written."""

import verifiers.v1 as vf
from product.servers.tool import ProductToolset


class ProductData(vf.TaskData):
    answer: str


class ProductTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ProductTask(vf.Task[ProductData, vf.State, ProductTaskConfig]):
    @classmethod
    def toolsets(cls, config: ProductTaskConfig) -> list[vf.Toolset]:
        return [ProductToolset(config.tools)]

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class ProductConfig(vf.TasksetConfig):
    task: ProductTaskConfig = ProductTaskConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self) -> list[ProductTask]:
        return []  # the rows come with the requests
