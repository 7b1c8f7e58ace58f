"""The HTML of a report."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1d2730; --soft: #5b6670; --line: #e1e6ea; --wash: #f6f8fa; --accent: #0b5fa5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 1.9rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.3rem; margin: 3rem 0 0.6rem; }
h3 { font-size: 1.02rem; margin: 0 0 0.7rem; }
p { margin: 0.3rem 0; }
.lead, .note, figcaption, th, summary { color: var(--soft); }
.note, figcaption { font-size: 0.86rem; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 1.2rem 1.3rem;
  margin: 1rem 0; overflow-x: auto; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 1rem; }
.grid .card { margin: 0; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.84rem; }
th { font-weight: 500; text-align: right; vertical-align: bottom; padding: 0.3rem 0.5rem;
  border-bottom: 1.5px solid var(--line); }
td { text-align: right; padding: 0.36rem 0.5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
tr.reference td { color: var(--soft); font-style: italic; }
td.best { font-weight: 650; color: var(--accent); }
td small { color: var(--soft); font-weight: 400; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.2rem; margin: 0;
  font-size: 0.9rem; }
dt { color: var(--soft); } dd { margin: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.3rem; font-size: 0.88rem; margin: 0.4rem 0 1rem; }
.legend i { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle;
  margin-right: 0.45rem; }
details { margin: 0.9rem 0 0; } summary { cursor: pointer; font-size: 0.9rem; }
details[open] summary { margin-bottom: 0.8rem; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
<div class="card"><dl>
{%- for name, value in settings.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{%- endfor %}
</dl></div>
<p class="note">Means over seeds; ± is half of the 95 % confidence interval (Student's t), and ratios are
paired by seed. Bold: the best of the policies. Grey: references, which no policy can be expected to reach.
The endless pool is the same fleet with KV without end; the clairvoyant policy knows how long each tool call
will take; no schedule at all is faster than the lower bound. Mean and p90 are of task completion, group s is
from a group's first submission to its last finish, recomputed counts tokens prefilled again, idle is the
share of time in which an engine had nothing to do while work waited, slowdown is completion over the time
alone on an empty system, and Jain's index of the slowdowns is 1 where they are even.</p>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
<div class="legend">
{%- for entry in legend %}
<span><i style="border-color: {{ entry.colour }}; border-top-style: {{ entry.style }}"></i>
{{- entry.label }}</span>
{%- endfor %}
</div>
{%- if section.plots %}
<div class="grid">
{%- for plot in section.plots %}
<div class="card"><figure>{{ plot }}</figure></div>
{%- endfor %}
</div>
{%- endif %}
{% for place in section.places %}
<div class="card">
<h3>{{ place.title }}</h3>
{{ table(place.headline) }}
{%- for note in place.notes %}
<p class="note">{{ note }}</p>
{%- endfor %}
<details><summary>All measures</summary>{{ table(place.measures) }}</details>
</div>
<div class="grid">
{%- for plot in place.plots %}
<div class="card"><figure>{{ plot.svg }}<figcaption>{{ plot.caption }}</figcaption></figure></div>
{%- endfor %}
</div>
{%- for plot in place.timelines %}
<div class="card"><figure>{{ plot.svg }}<figcaption>{{ plot.caption }}</figcaption></figure></div>
{%- endfor %}
{% endfor %}
</section>
{% endfor %}
</main>
</body>
</html>
"""

TABLE = """<table>
<thead><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for line in lines %}
<tr{% if line.is_reference %} class="reference"{% endif %}>
{%- for cell in line.cells %}<td{% if cell.is_best %} class="best"{% endif %}>{{ cell.text }}
{%- if cell.spread %} <small>±{{ cell.spread }}</small>{% endif %}</td>{% endfor -%}
</tr>
{%- endfor %}
</tbody>
</table>"""
