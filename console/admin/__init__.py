"""Django's admin: records to look at, and the door's actions on engines and checkpoints."""

from django.contrib import admin

from console.admin import engines, people, records, schedules

admin.site.site_header = "Quarterdeck administration"
admin.site.site_title = "Quarterdeck"
admin.site.index_title = "Records"

__all__ = ["engines", "people", "records", "schedules"]
