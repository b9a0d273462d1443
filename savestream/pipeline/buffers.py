"""placeholder written next"""


class StagingPool:
    limit_bytes: int = 0
