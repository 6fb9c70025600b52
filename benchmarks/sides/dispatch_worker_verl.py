"""verl's worker of the benchmarks `dispatch` and `calls`: the same methods."""

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


class DispatchWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def one_column_back(self, batch: DataProto) -> DataProto:
        column = batch.batch["advantages"]
        assert float(column[0, 0]) >= 0
        return DataProto.from_dict({"returns": column})
