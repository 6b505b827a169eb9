"""A real browser shows a page of another site, which tries to use the API on loopback in every way a page has."""

import asyncio

import pytest
from playwright.async_api import Page, async_playwright

from osrdyne.aio.clock import SystemClock
from osrdyne.api.access.authenticators import authenticators_of
from osrdyne.api.access.checks import Access
from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.api.server import ApiServer
from osrdyne.config.models import ApiSettings
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector
from tests.security.http_server import Answer, answering

CHROMIUM = "/usr/bin/chromium"
PATIENCE = 120.0

ATTACKS = {
    "simple request": "fetch(url, {method: 'POST', mode: 'no-cors', body: '{}'})",
    "credentials": "fetch(url, {method: 'POST', mode: 'no-cors', credentials: 'include', body: '{}'})",
    "JSON": "fetch(url, {method: 'POST', body: '{}', headers: {'content-type': 'application/json'}})",
    "JSON as a blob": "fetch(url, {method: 'POST', mode: 'no-cors', body: new Blob([], {type: 'application/json'})})",
    "other method": "fetch(url, {method: 'PUT', body: '{}', headers: {'content-type': 'application/json'}})",
    "beacon": "navigator.sendBeacon(url, new Blob(['{}'], {type: 'text/plain'}))",
    "read": "fetch(url.replace('/start', ''), {headers: {}}).then(answer => answer.text())",
}
FORM = """url => {
  const form = document.createElement('form');
  form.method = 'POST'; form.enctype = 'text/plain'; form.action = url;
  document.body.append(form); form.submit();
}"""


def another_site(_: str) -> Answer:
    """A web site that is not the API's."""
    return 200, {"content-type": "text/html"}, b"<!doctype html><title>page</title><body>"


async def attempt(page: Page, script: str, url: str) -> object:
    """What the page learns."""
    code = f"url => Promise.resolve({script}).then(found => String(found.type ?? found), error => error.name)"
    return await page.evaluate(code, url)


@pytest.mark.proves("api/page-site-open-browser")
async def test_page_of_another_site_changes_and_reads_nothing_in_a_real_browser():
    pool, settings, asked = FakeInspector(), ApiSettings(port=0), []
    access = Access(authenticators_of(settings, clock=SystemClock())[0])
    app = create_app(
        pool, Metrics(), version="1", access=access, allowed_hosts=hosts_of(settings.host, settings.allowed_hosts)
    )

    async def recording(scope, receive, send):
        async def record(message):
            if message["type"] == "http.response.start":
                asked.append((scope["method"], message["status"]))
            await send(message)

        await app(scope, receive, record)

    server = ApiServer(lambda: recording, settings)
    server.bind()
    with answering(another_site) as site:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group, async_playwright() as playwright:
            serving = group.create_task(server.run())
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = await browser.new_page()
            # Another port of the same host is the same site and another origin; another name is another site.
            for name in ("127.0.0.1", "localhost"):
                await page.goto(site.replace("127.0.0.1", name))
                url = f"{server.url}/v1/group/start?key=k"
                found = {attack: await attempt(page, script, url) for attack, script in ATTACKS.items()}
                assert found["read"] == found["JSON"] == found["other method"] == "TypeError"
                await page.evaluate(FORM, url)
                await page.wait_for_url(f"{server.url}/**")
            await browser.close()
            serving.cancel()
    assert pool.group_views == {}
    assert asked.count(("POST", 403)) >= 2 * 4  # requests without a preflight arrive, and are refused
    assert not [one for one in asked if one[0] != "GET" and one[1] < 400]
