"""`headrace scheduler`."""

from services.scheduler.service import SchedulerService
from shared.service import main

if __name__ == "__main__":
    main(SchedulerService)
